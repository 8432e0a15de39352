"""How many workers and devices a node will have, as far as that can be told without asking it. Pure but for /proc."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.config import LaunchConfig
    from ddplaunch.model import AgentSpec

_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/sys/class/kfd", "/dev/dxg")
"""Where none of them is, no GPU of NVIDIA's or AMD's can be used; where one is, only the agent counts."""


def is_here(config: LaunchConfig) -> bool:
    """All agents that this launcher starts run on this machine."""
    return config.dry_run or not config.hosts


def has_driver() -> bool:
    """This machine may have GPUs."""
    return any(map(os.path.exists, _DRIVERS))


def known_gpus(spec: AgentSpec, config: LaunchConfig, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The devices that the node's workers may use: named, or none for want of a driver; else only the node knows."""
    if spec.gpus is not None:
        return spec.gpus
    if config.dry_run:
        return ()
    hides = any(name.endswith("_VISIBLE_DEVICES") for name in environ)
    return () if not config.hosts and not hides and not has_driver() else None


def known_workers(spec: AgentSpec, gpus: tuple[str, ...] | None, cpus: int | None) -> int | None:
    """As the agent counts them; ``cpus``: how many its node has, None if only it knows."""
    nproc = spec.nproc_per_node
    if isinstance(nproc, int):
        return nproc
    if nproc == "cpu":
        return cpus
    if nproc == "xpu" or gpus is None:
        return None
    by_gpu = max(1, len(gpus) // max(1, spec.gpus_per_proc)) if gpus else None
    return by_gpu or {None: 1, "auto": cpus}.get(nproc)


def how_counted(spec: AgentSpec) -> str:
    """For the user, where ``known_workers`` is None."""
    if spec.nproc_per_node == "cpu":
        return "one per CPU"
    if spec.nproc_per_node == "xpu":
        return "one per XPU"
    return "one per GPU" if spec.gpus_per_proc < 2 else f"one per {spec.gpus_per_proc} GPUs"


def _ordinals(first: int, last: int) -> str:
    return f"no. {first}" if first == last else f"no. {first} to {last}"


def gpus_of_worker(spec: AgentSpec, gpus: tuple[str, ...] | None, local_rank: int) -> str | None:
    """What CUDA_VISIBLE_DEVICES is set to for a worker; None where it is left as it is."""
    count = 1 if spec.virtual_local_rank else spec.gpus_per_proc
    if not count:
        return ",".join(spec.gpus) if spec.gpus else None
    if gpus is None:
        last = local_rank * count + count - 1
        return f"<{_ordinals(local_rank * count, last)} of the node's GPUs>"
    if not gpus and not spec.virtual_local_rank:
        return None
    named = gpus or tuple(map(str, range(local_rank + 1)))  # As torchrun, it goes by LOCAL_RANK where there is none.
    return ",".join(named[local_rank * count : (local_rank + 1) * count])
