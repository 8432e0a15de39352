"""The GPUs of a node are measured; one that fails or blocks does not hide the others. On simulated GPUs."""

from __future__ import annotations

import pytest

from ddplaunch.features.check.records import NodeGpuRates
from ddplaunch.protocol import wire
from tests.support.runs import PROGRAMS, run

pytestmark = pytest.mark.torch


def measured(*arguments: str, options: tuple[str, ...] = ("--dry-run", "--gpus", "0,1,2")) -> NodeGpuRates:
    finished = run(*options, "--nproc-per-node", "1", PROGRAMS / "measure_gpus.py", *arguments)
    assert finished.returncode == 0, finished.err
    (line,) = (line for line in finished.out.splitlines() if "check-gpus: " in line)
    record: NodeGpuRates = wire.decode(line.partition("check-gpus: ")[2].encode(), (NodeGpuRates,))
    return record


def test_each_gpu_has_all_rates() -> None:
    found = measured()
    assert (found.rank, found.missing) == (0, "")
    assert [(gpu.index, gpu.problem) for gpu in found.gpus] == [(0, ""), (1, ""), (2, "")]
    for gpu in found.gpus:
        assert "simulated" in gpu.name
        assert gpu.uuid.startswith("GPU-")
        assert min(gpu.matmul_flops, gpu.memory_bytes_per_s, gpu.peer_bytes_per_s) > 0


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("fails", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
        ("blocks", "it has not ended a measurement in 120 s"),
    ],
)
def test_a_gpu_that_fails_or_blocks_is_named(how: str, problem: str) -> None:
    found = measured(how)
    assert [gpu.matmul_flops > 0 for gpu in found.gpus] == [True, False, True]
    assert found.gpus[1].problem == problem


def test_without_a_gpu_the_reason_is_told() -> None:
    found = measured(options=())
    assert found.gpus == ()
    assert "finds no GPU that it can use" in found.missing
