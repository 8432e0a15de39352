"""Rehearses CUDA on the CPU, in a worker of a dry run, so that scripts written for GPUs run there unmodified.

``install`` replaces names in torch, once, before the script runs; importing this package replaces nothing. Tensors,
results and process groups are really the CPU's and gloo's. Each file answers for one part of torch; ``REHEARSED`` and
``NOT_REHEARSED`` say what a user can count on.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
import sys
from dataclasses import dataclass
from typing import Any

from ddplaunch.worker.rehearsal.tables import NOT_REHEARSED, REHEARSED

__all__ = ["NOT_REHEARSED", "REHEARSED", "Gpu", "install"]


@dataclass(frozen=True)
class Gpu:
    """What each pretended GPU answers when the script asks what it is."""

    name: str = "NVIDIA H100 80GB HBM3 (rehearsed on the CPU)"
    memory_bytes: int = 80 << 30
    capability: tuple[int, int] = (9, 0)
    processors: int = 132


def install(devices: int, gpu: Gpu | None = None, *, compiles: bool = False) -> None:
    """Make this process a worker on a node with ``devices`` GPUs, all such as ``gpu`` says.

    It sees those of them that CUDA_VISIBLE_DEVICES names, or all. Torch may be imported already, and must not have used
    a GPU. With ``compiles``, ``torch.compile`` compiles for the CPU.
    """
    from ddplaunch.worker.rehearsal import cuda, groups, kernels, profiling, refusal, stand_ins, tensors, training
    from ddplaunch.worker.rehearsal.node import Node, hide_real_gpus

    node = Node(devices, gpu or Gpu())
    hide_real_gpus()
    tensors.install(node, compiles)
    cuda.install(node)
    groups.install(node)
    training.install(compiles)
    profiling.install()
    kernels.install()
    stand_ins.spread()
    _rehearse_in_children(devices, gpu or Gpu(), compiles)
    sys.excepthook = refusal.excepthook


def _rehearse_in_children(devices: int, gpu: Gpu, compiles: bool) -> None:
    """Processes that the script starts by ``multiprocessing``, unless by fork, install the rehearsal as they start."""

    class Installation:
        def __reduce__(self) -> tuple[Any, ...]:
            return functools.partial(install, compiles=compiles), (devices, gpu)

    original = multiprocessing.spawn.get_preparation_data
    multiprocessing.spawn.get_preparation_data = lambda name: {"rehearsal": Installation(), **original(name)}
