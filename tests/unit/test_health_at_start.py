"""The agent's look at its node before the first attempt: how long it waits, and whom it tells of a refusal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.agent.workers.start_plan import Placement
from ddplaunch.errors import HARDWARE, LaunchError
from ddplaunch.features.gpus import reader
from ddplaunch.features.gpus.agent import begin
from ddplaunch.features.gpus.records import GpuReading, GpusRead
from ddplaunch.features.health.agent import HealthPart
from ddplaunch.features.health.records import HardwareOfNode, NodeHealth
from ddplaunch.protocol.results import Round
from ddplaunch.system import devices
from tests.support.configs import agent_spec, rendezvous_config

LOST = GpuReading(index=0, uuid="GPU-0", error="GPU is lost")
_COUNTS = ("attempt", "restart_count", "node_rank", "nnodes", "first_rank", "local_world_size", "world_size")
PLACEMENT = Placement(1, "CUDA_VISIBLE_DEVICES", (("0",),), None, {})


class Node:
    """A node whose driver is not there: the test says what it answers."""

    def __init__(self, *, answers: tuple[GpuReading, ...] = ()) -> None:
        self.sent: list[object] = []
        self.told: list[str] = []
        self.waits: list[bool] = []
        spec = agent_spec(rendezvous=rendezvous_config())
        self.is_stopping = False
        gpus = begin(spec, self.sent.append)
        assert gpus
        gpus.placement = PLACEMENT
        node: Any = SimpleNamespace(
            spec=spec,
            begun={"gpus": gpus},
            rendezvous=SimpleNamespace(tell_cannot_join=self.told.append, clock_ahead_s=(59.0, 61.0)),
            report=self.sent.append,
            outbox=SimpleNamespace(send=self.sent.append),
            post=self.sent.append,
            wait=self._wait,
            is_stopping=lambda: self.is_stopping,
        )
        self.gpus, self.part = gpus, HealthPart(node)
        self._answers = answers

    def _wait(self, done: Callable[[], bool], deadline: Callable[[], float]) -> bool:
        if self._answers:
            read = GpusRead(gpus=self._answers)
            self.gpus.on_event(read)
            self.part.on_event(read)
        self.waits.append(done())
        assert deadline() - time.monotonic() < 4
        return done()


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_nvml", lambda: True)
    monkeypatch.setattr(reader.GpuReader, "start", lambda _: SimpleNamespace(ask=print, pid=1))


def test_a_stop_of_the_run_is_not_delayed_by_a_driver_that_does_not_answer() -> None:
    node = Node()
    node.is_stopping = True
    assert node.part.may_take_part()
    assert (node.waits, node.sent) == ([True, True], [])


def test_a_refused_node_tells_the_others_before_it_ends() -> None:
    node = Node(answers=(LOST,))
    with pytest.raises(LaunchError, match="the hardware is not sound: gpu3: GPU 0") as raised:
        node.part.may_take_part()
    assert raised.value.exit_code == HARDWARE
    assert node.told == [raised.value.message]
    assert isinstance(node.sent[-1], NodeHealth)


def test_what_a_node_has_is_told_to_the_launcher_that_watches_the_job_once() -> None:
    node, round_ = (
        Node(answers=(replace(LOST, error=""),)),
        Round(**dict.fromkeys(_COUNTS, 0), master_addr="10.0.0.1", master_port=1),
    )
    assert node.part.may_take_part()
    for _ in range(2):
        node.part.on_attempt(SimpleNamespace(), round_)  # type: ignore[arg-type]
    (told,) = (record for record in node.sent if isinstance(record, HardwareOfNode))
    assert (told.host, told.attempt, told.clock_ahead_s) == ("gpu3", 0, 59.0)
    assert [gpu.uuid for gpu in told.hardware.gpus] == ["GPU-0"]
