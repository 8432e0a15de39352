"""The rates of all nodes are put together, whatever a worker has printed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddplaunch import LaunchConfig
from ddplaunch.cluster.hosts import Host
from ddplaunch.config import HealthPolicy
from ddplaunch.errors import CHECK_WARNED, HARDWARE
from ddplaunch.features.check import check, deep_check
from ddplaunch.features.check import job as check_job
from ddplaunch.features.check.page import CheckedNode
from ddplaunch.features.check.records import GpuRates, NodeGpuRates
from ddplaunch.features.health.records import NodeHealth
from ddplaunch.protocol import wire
from ddplaunch.protocol.gpus import HealthFinding
from tests.support.asked import asked
from tests.unit.test_check_page import LOOK


def test_a_node_without_an_answer_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    second = NodeGpuRates(rank=1, gpus=(GpuRates(index=0, name="H100"),))
    printed = [b"rubbish", wire.encode(second).strip(), b'{"record":"NodeGpuRates","rank":2,"gpus":7}']
    monkeypatch.setattr(check_job, "run", lambda _config, _prefix: (None, printed))
    config = LaunchConfig(script="x.py", hosts=(Host("a"), Host("b"), Host("c")), max_nodes=3, min_nodes=3)
    assert deep_check.measure(config, ["a", "b", "c"]) == [
        ("a", NodeGpuRates(rank=0, missing="its worker has ended without an answer")),
        ("b", second),
        ("c", NodeGpuRates(rank=2, missing="its worker has ended without an answer")),
    ]


def test_the_worker_writes_what_the_launcher_reads() -> None:
    """Read as text: the module imports torch."""
    spec = find_spec(deep_check.MODULE)
    assert spec
    assert spec.origin
    assert f'PREFIX = "{deep_check._PREFIX.decode()}"\n' in Path(spec.origin).read_text()


# The exit code of a check.

REMAP = HealthFinding(
    rule="row-remap-failed", text="a row of its memory could not be remapped", severity="refuse", gpu=1
)


@pytest.mark.parametrize(("policy", "code"), [("refuse", HARDWARE), ("warn", CHECK_WARNED)])
def test_a_node_that_a_start_refuses_has_the_code_of_such_a_start(
    policy: HealthPolicy, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = replace(LOOK, health=NodeHealth(findings=(REMAP,)))
    monkeypatch.setattr(check, "_inspect", lambda _config: ([CheckedNode(host="gpu1", report=report)], []))
    monkeypatch.setattr(check, "_measure", lambda _config, _nodes: (None, None))
    shown: list[str] = []
    assert check.check(asked("", shown.append, config=LaunchConfig(script="x.py", health=policy))) == code
    assert "warning: gpu1: GPU 1: a row of its memory could not be remapped" in shown
    assert ("jobs do not use gpu1 (--health)" in shown) is (policy == "refuse")
