"""The rates of all nodes are put together, whatever a worker has printed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddplaunch import LaunchConfig
from ddplaunch.config import HealthPolicy
from ddplaunch.errors import CHECK_WARNED, HARDWARE
from ddplaunch.features.check import check, deep_check
from ddplaunch.features.check.page import CheckedNode
from ddplaunch.features.check.queries import GpuRates, NetworkRates, NodeGpuRates
from ddplaunch.features.health.records import NodeHealth
from ddplaunch.protocol import wire
from ddplaunch.protocol.results import HealthFinding
from tests.support import golden
from tests.support.asked import asked
from tests.unit.test_check_page import LOOK


def test_a_node_without_an_answer_has_a_reason() -> None:
    second = NodeGpuRates(rank=1, gpus=(GpuRates(index=0, name="H100"),))
    printed = [b"rubbish", wire.encode(second).strip(), b'{"record":"NodeGpuRates","rank":2,"gpus":7}']
    assert deep_check.of_nodes(["a", "b", "c"], printed) == [
        ("a", NodeGpuRates(rank=0, missing="its worker has ended without an answer")),
        ("b", second),
        ("c", NodeGpuRates(rank=2, missing="its worker has ended without an answer")),
    ]


# The exit code of a check.

REMAP = HealthFinding(
    rule="row-remap-failed", text="a row of its memory could not be remapped", severity="refuse", gpu=1
)


@pytest.mark.parametrize(("policy", "code"), [("refuse", HARDWARE), ("warn", CHECK_WARNED)])
def test_a_node_that_a_start_refuses_has_the_code_of_such_a_start(
    policy: HealthPolicy, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = replace(LOOK, health=NodeHealth(findings=(REMAP,)))
    monkeypatch.setattr(check, "inspect", lambda _config: ([CheckedNode(host="gpu1", report=report)], []))
    rates = NetworkRates(nccl=("",), pairs=(0.0,), backend="gloo", all_reduce=0.0)
    monkeypatch.setattr(check, "network_rates", lambda _config, _nodes: rates)
    shown: list[str] = []
    assert check.check(asked("", shown.append, config=LaunchConfig(script="x.py", health=policy))) == code
    assert "warning: gpu1: GPU 1: a row of its memory could not be remapped" in shown
    assert ("jobs do not use gpu1 (--health)" in shown) is (policy == "refuse")


# The page of the rates.


USUAL = {"matmul_flops": 700e12, "memory_bytes_per_s": 2.9e12, "peer_bytes_per_s": 380e9}


def gpu(index: int, name: str = "H100", **rates: Any) -> GpuRates:
    return GpuRates(index=index, name=name, uuid=f"GPU-{index}", **{**USUAL, **rates})


def nodes(count: int, *last: GpuRates) -> list[tuple[str, NodeGpuRates]]:
    """``count`` nodes of four usual GPUs each; the last has others."""
    usual = [(f"gpu{number}", NodeGpuRates(rank=number, gpus=tuple(map(gpu, range(4))))) for number in range(count)]
    return [*usual, (f"gpu{count}", NodeGpuRates(rank=count, gpus=last))] if last else usual


SLOW = gpu(2, matmul_flops=511e12)
FAILED = gpu(3, problem="OutOfMemoryError: CUDA out of memory", matmul_flops=0.0)
CASES = {
    "slow, failed, and not there": [
        *nodes(3, gpu(0), gpu(1), SLOW, FAILED),
        ("gpu9", NodeGpuRates(rank=4, missing="torch 2.13.0+cpu finds no GPU that it can use")),
    ],
    "more than a tenth below the median, and less": nodes(
        3, *(gpu(round(share * 1000), **{name: USUAL[name] * share}) for name in USUAL for share in (0.899, 0.901))
    ),
    "only GPUs of one name are compared": nodes(3, *(gpu(index, "T4", matmul_flops=40e12) for index in range(2))),
    "what was not measured is not judged": nodes(1, gpu(0, peer_bytes_per_s=0.0)),
    "one": [("gpu1", NodeGpuRates(rank=0, gpus=(gpu(0),)))],
    "none": [("gpu1", NodeGpuRates(rank=0, missing="no torch"))],
}


def test_the_page_has_a_line_for_a_name_and_one_for_what_is_wrong() -> None:
    told = {
        name: "\n".join([deep_check.rates_table(found), *deep_check.problems(found)]) for name, found in CASES.items()
    }
    golden.check("rates", told)
