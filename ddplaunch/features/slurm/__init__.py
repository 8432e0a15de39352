"""A run in a SLURM job: nodes that SLURM drains or loses are left, and the job is requeued when its time is up.

The launcher asks ``scontrol``, and loads nothing of it in a run outside of SLURM. Must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


def rows() -> tuple[object, ...]:
    """``--requeue-on``."""
    from ddplaunch.rows import Option

    return (
        Option(
            "--requeue-on",
            "USR1,TERM",
            "In a SLURM job these signals also stop the run, and SLURM then requeues the job. Default: none.",
            "",
            heading="Restarts and stopping",
        ),
    )


def prepare(config: LaunchConfig, _stdout_fd: int | None) -> LaunchConfig:
    """``config`` with a warning if SLURM would not requeue the job; raise LaunchError if it cannot be asked."""
    from ddplaunch.features.slurm.requeue import prepare

    return prepare(config)
