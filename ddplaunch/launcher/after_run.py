"""What a run says at its end about what is missing or left: values of functions, processes.

Runs in the launcher, in the main thread; no agent runs any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError
from ddplaunch.launcher.display import failure_page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
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
