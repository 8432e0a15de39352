"""What follows a run once its result is shown: what is known of nodes, SLURM's requeue, its page, ``--on-exit``.

Runs in the launcher, in the main thread; no agent runs any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError
from ddplaunch.features.on_exit import on_exit
from ddplaunch.features.requeue import slurm_requeue
from ddplaunch.launcher.display import failure_page

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.page.launcher import RunPage
    from ddplaunch.launcher.display.messages import UserMessages
    from ddplaunch.protocol.results import AttemptResult, RunResult


def with_leftovers(error: LaunchError | None, result: RunResult) -> LaunchError | None:
    """``error``, which also says what the run has left on its nodes."""
    left = failure_page.leftovers(result)
    return error and LaunchError(f"{error.message}; left: {left}", error.hint, error.exit_code)


def lost_values(
    config: LaunchConfig, attempts: Sequence[AttemptResult], folder: Path | None, incomplete: Mapping[str, str]
) -> LaunchError | None:
    """The error of functions that have all returned, but of which values have not arrived; None if there is none.

    ``incomplete`` is as in ``LogCollector``.
    """
    if config.entry != "function" or not attempts or attempts[-1].outcome != "succeeded":
        return None
    from ddplaunch.features.functions import function_call

    return function_call.lost_values(attempts[-1], folder, config, incomplete)


def finish(
    config: LaunchConfig,
    result: RunResult,
    error: LaunchError | None,
    lost: Mapping[str, str],
    messages: UserMessages,
    page: RunPage,
    is_interrupted: Callable[[], bool],
) -> None:
    """Do it, and close ``messages``.

    ``error`` is the reason of a failure other than a worker's; ``lost`` is as in ``node_memory.remember``.
    """
    if lost or result.health or any(attempt.outcome == "failed" or attempt.cause for attempt in result.attempts):
        from ddplaunch.features.health import node_memory  # A run without a failure does not wait for the import.

        node_memory.remember(config, result, lost, messages.show)
    page.begin_last(result.duration_s, has_failed=result.outcome == "failed" and bool(result.attempts))
    slurm_requeue.requeue(result, messages.show)
    messages.drain(result, is_interrupted)
    page.wait_for_last(result.duration_s, is_interrupted)
    if config.on_exit:
        on_exit.run(config, result, error, messages.show, is_interrupted)
        messages.drain(result, is_interrupted)
    messages.close()
