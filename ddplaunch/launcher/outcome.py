"""The outcome of a run: from its attempts, signals and errors to the RunResult and the exit code.

Runs in the launcher, after the last agent has ended. Pure.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddplaunch import errors
from ddplaunch.launcher.display import failure_page
from ddplaunch.protocol import first_failure
from ddplaunch.protocol.run_result import RunResult

if TYPE_CHECKING:
    from ddplaunch.errors import LaunchError
    from ddplaunch.protocol.results import AttemptResult, Outcome, WorkerExit


def result(
    *,
    run_id: str,
    attempts: Sequence[AttemptResult],
    error: LaunchError | None,
    signals: Sequence[int],
    signals_came_late: bool = False,
    continues: bool = False,
    unkillable_pids: tuple[int, ...],
    unreachable_hosts: tuple[str, ...],
    duration_s: float,
    run_dir: str | None,
) -> RunResult:
    """The result of a run.

    ``error`` is the reason of a failure other than a worker's; ``signals`` are the signals that stopped the run, in
    order. ``signals_came_late``: the outcome was known before the first of them. ``continues``: the run was stopped so
    that it goes on later. The other arguments are fields of the result.
    """
    last = attempts[-1] if attempts else None
    outcome, first = _outcome(last, error, may_be_stopped=bool(signals) and not signals_came_late)
    code = error.exit_code if error else _exit_code(outcome, first, signals, last, left_running=bool(unkillable_pids))
    code = errors.TIME_IS_UP if continues and outcome == "stopped" else code
    return RunResult(
        run_id=run_id,
        exit_code=code,
        outcome=outcome,
        duration_s=duration_s,
        attempts=tuple(attempts),
        first_failure=first,
        signal=signal.Signals(signals[0]).name if signals else None,
        run_dir=run_dir,
        unkillable_pids=unkillable_pids,
        unreachable_hosts=unreachable_hosts,
        reason=error.message if error else "",
    )


def _outcome(
    last: AttemptResult | None, error: LaunchError | None, *, may_be_stopped: bool
) -> tuple[Outcome, WorkerExit | None]:
    """The outcome, and the worker's failure that explains it if one does.

    ``may_be_stopped``: a signal may be why the last attempt has ended.
    """
    first = _first_failure(last, is_explained=bool(error or (last and last.reason)))
    if error:
        return "failed", first
    if last is None or last.attempt_follows:
        return "stopped", None
    may_be_stopped = may_be_stopped and not last.lost_rendezvous  # Lost before a signal has stopped this node.
    if last.outcome == "failed" and may_be_stopped and (first is None or first_failure.is_consequence(first)):
        # Nodes receive StopWorkers one after the other: a worker may fail because its peers are stopped before it.
        # Without a failed worker, processes could not be stopped; the result lists them.
        return "stopped", None
    return last.outcome, first if last.outcome == "failed" else None


def _first_failure(last: AttemptResult | None, *, is_explained: bool) -> WorkerExit | None:
    """``is_explained``: the attempt ended for another reason, by which ranks lost their peers: a lost node, a hang."""
    first = (last.cause or first_failure.first_failure(last.exits)) if last else None
    return None if first and is_explained and first_failure.is_consequence(first) else first


def _exit_code(
    outcome: Outcome,
    first: WorkerExit | None,
    signals: Sequence[int],
    last: AttemptResult | None,
    *,
    left_running: bool,
) -> int:
    if outcome == "succeeded":
        return errors.PROCESSES_LEFT if left_running else 0
    if outcome == "stopped":
        return 128 + signals[0] if signals else errors.NODE_LOST
    if (first and first.hardware) or (last and last.node_leaves):
        return errors.HARDWARE
    if first is None:
        hung = bool(last and last.hung)
        return errors.PROCESSES_LEFT if left_running else errors.HUNG if hung else errors.NODE_LOST
    if first.give_up:
        return errors.GAVE_UP
    # A broken agent may report the failure of a worker that ended by exit code 0.
    return first_failure.exit_code(first) or 1


def with_leftovers(error: LaunchError | None, result: RunResult) -> LaunchError | None:
    """``error``, which also says what the run has left on its nodes."""
    left = failure_page.leftovers(result)
    return error and errors.LaunchError(f"{error.message}; left: {left}", error.hint, error.exit_code)
