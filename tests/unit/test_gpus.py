"""GPUs that work, and GPUs on which NCCL waits."""

from __future__ import annotations

import json
from dataclasses import replace

from ddplaunch.features.gpus.records import GpuReading
from ddplaunch.features.hangs import explanation
from ddplaunch.features.hangs.explanation import with_gpus
from ddplaunch.features.hangs.rank_state import JobState, spins, works
from ddplaunch.features.hangs.records import NodeEvidence, RankEvidence
from tests.support import golden

SPINNING = GpuReading(index=0, utilization=100, memory_utilization=0, power_w=120.0, power_limit_w=700.0)
WORKING = replace(SPINNING, index=1, memory_utilization=40, power_w=650.0)


def test_a_spinning_kernel_is_busy_without_memory_and_power() -> None:
    """A question is what differs from a GPU that spins."""
    golden.check_answers("spinning_gpus", lambda text: spins(replace(SPINNING, **json.loads(text))))


def test_a_job_whose_gpu_works_is_not_stuck() -> None:
    rank = RankEvidence(rank=0, local_rank=0, host="a", pid=1, silent_s=99.0, window_s=9.0)
    found = explanation.explain([rank])
    assert found.job_state is JobState.STUCK
    assert with_gpus(found, [NodeEvidence(host="a", gpus=(SPINNING,))]).job_state is JobState.STUCK
    busy = with_gpus(found, [NodeEvidence(host="a", gpus=(SPINNING, WORKING))])
    assert busy.job_state is JobState.BUSY
    assert busy.sentences[-2:] == (
        "1 GPU computes, for example GPU 1 of a",
        "1 GPU spins: 100 % busy at low power, as NCCL waits",
    )


def test_a_gpu_that_does_not_tell_neither_works_nor_spins() -> None:
    assert not works(GpuReading(index=0))
    assert not spins(GpuReading(index=0))
