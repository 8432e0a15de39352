"""The GPUs of a node are measured; one that fails or blocks does not hide the others. On simulated GPUs.

Where there is none, --check says so: tests/process/test_check.py.
"""

from __future__ import annotations

import pytest

from ddplaunch.features.check.queries import NodeGpuRates
from ddplaunch.protocol import wire
from tests.support.runs import PROGRAMS, run

pytestmark = pytest.mark.torch


def measured(how: str) -> NodeGpuRates:
    finished = run("--dry-run", "--gpus", "0,1,2", "--nproc-per-node", "1", PROGRAMS / "measure_gpus.py", how)
    assert finished.returncode == 0, finished.err
    (line,) = (line for line in finished.out.splitlines() if "check-gpus: " in line)
    record: NodeGpuRates = wire.decode(line.partition("check-gpus: ")[2].encode(), (NodeGpuRates,))
    return record


def test_each_gpu_has_all_rates_but_one_that_fails_which_is_named() -> None:
    found = measured("fails")
    assert (found.rank, found.missing) == (0, "")
    problem = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert [(gpu.index, gpu.problem) for gpu in found.gpus] == [(0, ""), (1, problem), (2, "")]
    for gpu in found.gpus:
        assert "simulated" in gpu.name
        assert gpu.uuid.startswith("GPU-")
        assert (min(gpu.matmul_flops, gpu.memory_bytes_per_s, gpu.peer_bytes_per_s) > 0) is (gpu.index != 1)


def test_a_gpu_that_blocks_is_named() -> None:
    found = measured("blocks")
    assert [gpu.matmul_flops > 0 for gpu in found.gpus] == [True, False, True]
    assert found.gpus[1].problem == "it has not ended a measurement in 120 s"
