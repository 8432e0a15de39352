"""GPUs that nobody uses, on a machine of several users: ``--gpus free:2``, ``--wait-for-gpus``.

``register`` has what all runs of the machine say about the GPUs that they use, and ``choice`` chooses, in the agent.
Every run on GPUs is in the register. Must not import torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


def prepare(config: LaunchConfig, _stdout_fd: int | None) -> LaunchConfig:
    """Before the run: in a dry run, all GPUs are free."""
    from ddplaunch.text import free_gpus

    count = free_gpus(config.workers.gpus)
    if count is None or not config.dry_run:
        return config
    if not count and not isinstance(config.workers.nproc_per_node, int):
        hint = "Say how many, as --gpus free:4, or give --nproc-per-node a number."
        raise UsageError("--gpus free: a dry run does not know how many GPUs a node has", hint, ("--gpus",))
    return replace(config, workers=replace(config.workers, gpus=tuple(map(str, range(count))) if count else None))
