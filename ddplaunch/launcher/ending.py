"""How a run ended: from its attempts, its signals and its troubles to the one verdict and the exit code. Pure."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch import errors, verdict
from ddplaunch.model import AttemptResult, Injected, Outcome, RunResult, WorkerExit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.job import Job
    from ddplaunch.records import AgentFailed


def result(
    *,
    run_id: str,
    attempts: Sequence[AttemptResult],
    failed: AgentFailed | None,
    signals: Sequence[int],
    left: tuple[int, ...],
    unasked: tuple[str, ...],
    duration_s: float,
    run_dir: str | None,
    accounts: Callable[[RunResult], tuple[Injected, ...]],
    job: Job | None = None,
) -> RunResult:
    """The verdict. ``failed`` is trouble that ended the run, ``signals`` those that asked for its end, in order.

    ``left`` and ``unasked`` are the result's; ``accounts`` tells what became of the injections.
    """
    last = attempts[-1] if attempts else None
    is_over = last is not None and not last.restarts
    outcome: Outcome = "failed" if failed else last.outcome if last and is_over else "stopped"
    first = (last.cause or verdict.first_failure(last.exits)) if last and outcome == "failed" else None
    if signals and not failed and outcome == "failed" and (first is None or verdict.is_consequence(first)):
        # Nodes hear of the stop one after the other: a worker misses its peers on another node before it is told.
        # And what goes wrong with the stop itself, a process that cannot be ended, is told as what is left.
        outcome, first = "stopped", None
    names = [signal.Signals(signum).name for signum in signals]
    requeues = bool(job and outcome == "stopped" and set(names) & set(job.requeue_on))
    code = (
        failed.exit_code if failed else _exit_code(outcome, first, signals, bool(left), hung=bool(last and last.hung))
    )
    ended = RunResult(
        run_id=run_id,
        # A step that is started with --kill-on-bad-exit must not end before the one that asks SLURM has done so.
        exit_code=0 if requeues and job and not job.asks else code,
        outcome=outcome,
        duration_s=duration_s,
        attempts=tuple(attempts),
        first_failure=first,
        signal=names[0] if names else None,
        run_dir=run_dir,
        left=left,
        unasked=unasked,
        job=job,
        requeues=requeues,
    )
    return replace(ended, injections=accounts(ended))


def _exit_code(outcome: Outcome, first: WorkerExit | None, signals: Sequence[int], is_left: bool, *, hung: bool) -> int:
    if outcome == "succeeded":
        return errors.LEFT_RUNNING if is_left else 0
    if outcome == "stopped":
        return 128 + signals[0] if signals else errors.NODE_LOST
    if first is None:
        return errors.LEFT_RUNNING if is_left else errors.HUNG if hung else errors.NODE_LOST
    # One that raised and was then told to stop on its way out ended by our signal; its own code was 1.
    by_us = first.error is not None and first.returncode == -signal.SIGTERM
    return 1 if by_us else verdict.exit_code(first.returncode)
