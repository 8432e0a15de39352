"""SLURM's requeue of a job, at the end of a run that its signal has stopped.

Runs in the launcher, in the main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.launcher.watches import Watch

if TYPE_CHECKING:
    from ddplaunch.launcher.watches import RunEnd, RunServices


class Requeue(Watch):
    """Requeues the SLURM job of a run."""

    def __init__(self, run: RunServices) -> None:
        self._show = run.messages.show

    def on_run_ended(self, end: RunEnd) -> None:
        """Requeue the job if the run is to continue."""
        from ddplaunch.features.requeue import slurm_requeue

        slurm_requeue.requeue(end.result, self._show)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (Requeue(run),) if run.config.slurm_job else ()
