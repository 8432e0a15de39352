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
            sets="requeue_on",
            parse=_signals,
            heading="Restarts and stopping",
        ),
    )


def _signals(text: str, option: str) -> tuple[str, ...]:
    from ddplaunch.features.slurm.requeue import parse_signals

    return parse_signals(text, option)


def prepare(config: LaunchConfig, _stdout_fd: int | None) -> LaunchConfig:
    """As ``requeue.prepare``."""
    from ddplaunch.features.slurm.requeue import prepare

    return prepare(config)
