"""The job of SLURM that a run is in, and after which signals SLURM is to be asked to run it again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A job as SLURM's commands know it.

    Attributes:
        id: a task of an array is ``12_3``: its own number may mean the whole array.
        restarts: how often SLURM has requeued it.
        requeue_on: names of the signals after which it is to be requeued.
        asks: this launcher asks for that, alone of all of the run.
    """

    id: str
    restarts: int = 0
    requeue_on: tuple[str, ...] = ()
    asks: bool = False
