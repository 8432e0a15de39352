"""What a run in a SLURM job asks SLURM: its parts in the launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.features.slurm.node_watch import NodeWatch
from ddplaunch.launcher.watches import Watch

if TYPE_CHECKING:
    from ddplaunch.launcher.watches import RunEnd, RunServices


class Requeue(Watch):
    """Requeues the SLURM job of a run."""

    def __init__(self, run: RunServices) -> None:
        self._show = run.messages.show

    def on_run_ended(self, end: RunEnd) -> None:
        """Requeue the job if the run is to continue."""
        from ddplaunch.features.slurm import requeue

        requeue.requeue(end.result, self._show)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The parts of a run in the launcher."""
    return NodeWatch(run), Requeue(run)
