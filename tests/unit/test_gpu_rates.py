"""GPUs that are slower than others of their name are named, with what was measured; others never are."""

from __future__ import annotations

from typing import Any

import pytest

from ddplaunch.features.check import gpu_rates_page as page
from ddplaunch.features.check.gpu_rates_page import outliers
from ddplaunch.features.check.records import GpuRates, NodeGpuRates
from ddplaunch.protocol import wire

USUAL = {"matmul_flops": 700e12, "memory_bytes_per_s": 2.9e12, "peer_bytes_per_s": 380e9}


def gpu(index: int, name: str = "H100", **rates: Any) -> GpuRates:
    return GpuRates(index=index, name=name, uuid=f"GPU-{index}", **{**USUAL, **rates})


def nodes(count: int, *last: GpuRates) -> list[tuple[str, NodeGpuRates]]:
    """``count`` nodes of four usual GPUs each; the last has others."""
    usual = [(f"gpu{number}", NodeGpuRates(rank=number, gpus=tuple(map(gpu, range(4))))) for number in range(count)]
    return [*usual, (f"gpu{count}", NodeGpuRates(rank=count, gpus=last))] if last else usual


@pytest.mark.parametrize("measured", USUAL)
def test_a_gpu_more_than_a_tenth_below_the_median_is_an_outlier(measured: str) -> None:
    usual = [("a", gpu(index)) for index in range(4)]
    just_below, just_above = (("b", gpu(7, **{measured: USUAL[measured] * share})) for share in (0.899, 0.901))
    assert outliers([*usual, just_above]) == []
    slow = just_below[1]
    assert outliers([*usual, just_below]) == [("b", slow, measured, USUAL[measured], 5)]


def test_only_gpus_of_one_name_are_compared() -> None:
    slow = [("a", gpu(index, "T4", matmul_flops=40e12)) for index in range(2)]
    assert outliers([*slow, *(("a", gpu(index)) for index in range(9))]) == []


def test_what_was_not_measured_is_not_judged() -> None:
    assert outliers([("a", gpu(0, peer_bytes_per_s=0.0)), *(("a", gpu(index)) for index in range(3))]) == []
    assert outliers([]) == []
    assert outliers([("a", gpu(0))]) == []


def test_the_page_has_a_line_for_a_name_and_one_for_what_is_wrong() -> None:
    slow = gpu(2, matmul_flops=511e12)
    found = nodes(3, gpu(0), gpu(1), slow, gpu(3, problem="OutOfMemoryError: CUDA out of memory", matmul_flops=0.0))
    found.append(("gpu9", NodeGpuRates(rank=4, missing="torch 2.13.0+cpu finds no GPU that it can use")))
    assert page.rates_table(found).splitlines() == [
        "GPUs       hosts     matmul                      memory     to another GPU",
        "16 x H100  gpu[0-3]  511 TFLOP/s to 700 TFLOP/s  2.90 TB/s  380 GB/s",
    ]
    assert page.problems(found) == [
        "gpu9: no GPU was measured: torch 2.13.0+cpu finds no GPU that it can use",
        "gpu3: GPU 3 (GPU-3): OutOfMemoryError: CUDA out of memory",
        "gpu3: GPU 2 (GPU-2): matmul 511 TFLOP/s, 27 % below the median of the 15 GPUs of its name (700 TFLOP/s)",
    ]


def test_without_gpus_there_is_no_table() -> None:
    assert page.rates_table([("a", NodeGpuRates(rank=0, missing="no torch"))]) == ""


def test_what_a_worker_prints_is_checked() -> None:
    record = NodeGpuRates(rank=0, gpus=(gpu(0),))
    assert wire.decode(wire.encode(record), (NodeGpuRates,)) == record
    for bad in (b'"name":"\\u001b"', b'"matmul_flops":NaN', b'"index":-1'):
        key = bad.split(b":")[0]
        head, _, rest = wire.encode(record).partition(key + b":")
        line = head + bad + rest[rest.index(b",") :]
        with pytest.raises(wire.ProtocolError):
            wire.decode(line, (NodeGpuRates,))
