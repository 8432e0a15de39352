"""What the GPUs say about a job that seems to stand still.

A kernel that computes for minutes looks like a hang from the CPU's side. A GPU on which NCCL waits is told from it by
its power: its kernel only looks at a variable again and again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.rank_state import JobState
from ddplaunch.text import plural, quote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.features.hangs.explanation import Explanation
    from ddplaunch.features.hangs.records import NodeEvidence
    from ddplaunch.protocol.gpus import GpuReading

_WORKS_PERCENT = 5
_SPINS_PERCENT, _SPINS_MEMORY_PERCENT, _SPINS_POWER_SHARE = 99, 1, 0.5


def with_gpus(found: Explanation, nodes: Sequence[NodeEvidence]) -> Explanation:
    """``found``, but not stuck if a GPU of one of ``nodes`` works; with a sentence about GPUs that work or spin."""
    gpus = [(node.host, gpu) for node in nodes for gpu in node.gpus]
    working = [f"GPU {gpu.index} of {quote(host)}" for host, gpu in gpus if works(gpu)]
    failed = [f"GPU {gpu.index} of {quote(host)}: {quote(gpu.error)}" for host, gpu in gpus if gpu.error]
    spinning = sum(spins(gpu) for _, gpu in gpus)
    sentences = []
    if working:
        sentences.append(f"{_gpus_that(len(working), 'compute')}, for example {working[0]}")
    if spinning:
        sentences.append(f"{_gpus_that(spinning, 'spin')}: 100 % busy at low power, as NCCL waits")
    sentences += failed[:3]
    state = JobState.BUSY if working and found.job_state is JobState.STUCK else found.job_state
    return replace(found, job_state=state, sentences=(*found.sentences, *sentences))


def _gpus_that(count: int, verb: str) -> str:
    """``1 GPU computes``, ``2 GPUs compute``."""
    return f"{plural(count, 'GPU')} {verb}{'s' * (count == 1)}"


def spins(gpu: GpuReading) -> bool:
    """Whether the GPU runs a kernel that does nothing, as NCCL's while it waits; false if that is not known."""
    if gpu.utilization is None or gpu.memory_utilization is None or not gpu.power_w or not gpu.power_limit_w:
        return False
    is_idle_inside = gpu.memory_utilization <= _SPINS_MEMORY_PERCENT
    return gpu.utilization >= _SPINS_PERCENT and is_idle_inside and gpu.power_w < _SPINS_POWER_SHARE * gpu.power_limit_w


def works(gpu: GpuReading) -> bool:
    """Whether the GPU computes."""
    return gpu.utilization is not None and gpu.utilization >= _WORKS_PERCENT and not spins(gpu)
