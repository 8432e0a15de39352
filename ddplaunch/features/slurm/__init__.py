"""A run in a SLURM job: its variables, srun as a transport, nodes that SLURM drains, and a requeue when its time is up.

``tables`` has the rows for it, ``reader`` reads the variables. The launcher asks ``scontrol``, and loads nothing of
SLURM but the rows in a run outside of it. Must not import torch.
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
