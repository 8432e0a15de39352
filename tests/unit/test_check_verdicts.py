"""Which hosts a run with --check-first does without, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddplaunch.features.check import verdicts
from ddplaunch.features.check.page import CheckedNode
from ddplaunch.features.check.queries import GpuRates, ImportTimes, NodeGpuRates
from ddplaunch.features.health.records import NodeHealth
from ddplaunch.protocol.results import HealthFinding
from tests.unit.test_check_page import LOOK

FAST = ImportTimes(times_s=(1.0,))
ROW = HealthFinding(rule="row-remap-failed", text="a row is lost", severity="refuse", gpu=1)
USED = HealthFinding(rule="in-use", text="process 7 uses it already", gpu=1)
ECC = HealthFinding(rule="ecc-off", text="ECC is off", gpu=1)


def node(name: str, *unreachable: str, imports: ImportTimes = FAST, **look: object) -> CheckedNode:
    pairs = tuple((other, "timed out") for other in unreachable)
    report = replace(LOOK, **look)  # type: ignore[arg-type]
    return CheckedNode(host=name, report=report, imports=imports, unreachable=pairs, bytes_per_s=1e9)


@pytest.mark.parametrize(
    ("checked", "failed"),
    [
        (node("a"), False),
        (node("a", shm_free_bytes=None), True),
        (node("a", cuda=""), True),
        (node("a", imports=ImportTimes()), True),
        (node("a", health=NodeHealth(findings=(ROW,))), True),
        (node("a", health=NodeHealth(findings=(USED,))), True),
        (node("a", health=NodeHealth(findings=(ECC,))), False),
    ],
)
def test_what_a_node_tells_of_itself(checked: CheckedNode, failed: bool) -> None:
    assert list(verdicts.failed([checked], "refuse")) == ["a"] * failed


def test_health_warn_refuses_only_what_the_check_looks_for_and_programs_need_no_torch() -> None:
    sick = [node("a", health=NodeHealth(findings=(ROW,))), node("b", health=NodeHealth(findings=(USED,)))]
    assert list(verdicts.failed(sick, "warn")) == ["b"]
    assert not verdicts.failed([node("a", imports=ImportTimes())], "refuse", needs_torch=False)


@pytest.mark.parametrize(
    ("unreachable", "failed"),
    [
        ({"a": "b"}, "b"),  # Either could go; the first host serves the rendezvous.
        ({"b": "a"}, "b"),
        ({"a": "c", "b": "c", "d": "c"}, "c"),
        ({"c": "abd"}, "c"),
        ({"a": "b", "c": "d"}, "bd"),
        ({"a": "e"}, ""),  # It could not be used anyway.
    ],
)
def test_as_few_hosts_as_can_be_are_left_out_where_some_cannot_connect(
    unreachable: dict[str, str], failed: str
) -> None:
    found = verdicts.failed([node(name, *unreachable.get(name, "")) for name in "abcd"], "refuse")
    assert sorted(found) == sorted(failed)


def test_slow_links_and_gpus_are_named_but_no_node_without_gpus_for_having_none() -> None:
    checked = [replace(node(name), bytes_per_s=1e8 if name == "c" else 1e9) for name in "abcd"]
    checked.append(node("e", gpus=()))
    usual, slow = (GpuRates(index=0, name="H100", matmul_flops=flops) for flops in (7e14, 5e14))
    gpus = [(name, NodeGpuRates(rank=0, gpus=(slow if name == "b" else usual,))) for name in "abcd"]
    found = verdicts.slow(checked, [*gpus, ("e", NodeGpuRates(rank=4, missing="torch finds no GPU"))])
    assert sorted(found) == ["b", "c"]
    assert found["c"].startswith("c: at best 800 Mbit/s")
