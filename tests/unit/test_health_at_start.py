"""The agent's look at its node before the first attempt: how long it waits, and what it tells."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.agent.parts import Part, on_event
from ddplaunch.agent.workers.start_plan import Placement
from ddplaunch.errors import HARDWARE, LaunchError
from ddplaunch.features.gpus import reader
from ddplaunch.features.gpus.agent import begin
from ddplaunch.features.gpus.records import GpuEvent, GpuReading, GpusRead
from ddplaunch.features.health.agent import HealthPart
from ddplaunch.features.health.records import HardwareOfNode, NodeHealth
from ddplaunch.system import devices
from tests.support.configs import a_round, agent_spec, rendezvous_config

GPU = GpuReading(index=0, uuid="GPU-0")
LOST = GpuReading(index=0, uuid="GPU-0", error="GPU is lost")


def part_of(sent: list[object], *answers: GpuReading, is_stopping: bool = False) -> tuple[HealthPart, list[bool]]:
    """The part of a node whose driver gives ``answers``; and whether each of its waits was over at once."""
    gpus, waits = begin(spec := agent_spec(rendezvous=rendezvous_config()), sent.append), list[bool]()
    assert gpus
    gpus.placement = Placement(1, "CUDA_VISIBLE_DEVICES", (("0",),), {})

    def wait(done: Callable[[], bool], deadline: Callable[[], float]) -> bool:
        if answers:
            read = GpusRead(gpus=answers)
            gpus.on_event(read)
            part.on_event(read)
        waits.append(done())
        assert deadline() - time.monotonic() < 4
        return done()

    rest = {"report": sent.append, "outbox": SimpleNamespace(send=sent.append), "post": sent.append, "wait": wait}
    rendezvous = SimpleNamespace(tell_cannot_join=lambda reason, _code: sent.append(reason), clock_ahead_s=(59.0, 61.0))
    node: Any = SimpleNamespace(spec=spec, begun={"gpus": gpus}, rendezvous=rendezvous, **rest)
    node.is_stopping = lambda: is_stopping
    part = HealthPart(node)
    return part, waits


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_nvml", lambda: True)
    monkeypatch.setattr(reader.GpuReader, "start", lambda _: SimpleNamespace(ask=print, pid=1))


def test_a_stop_of_the_run_is_not_delayed_by_a_driver_that_does_not_answer() -> None:
    part, waits = part_of(sent := [], is_stopping=True)
    assert part.may_take_part()
    assert (waits, sent) == ([True, True], [])


def test_a_refused_node_tells_the_others_before_it_ends() -> None:
    part, _ = part_of(sent := list[object](), LOST)
    with pytest.raises(LaunchError, match="the hardware is not sound: gpu3: GPU 0") as raised:
        part.may_take_part()
    assert raised.value.exit_code == HARDWARE
    report, told = sent[-2:]
    assert isinstance(report, NodeHealth)
    assert told == raised.value.message


def test_what_is_read_of_gpus_reaches_the_parts_behind_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    part, _ = part_of([])
    behind, heard = Part(part._node), list[object]()
    monkeypatch.setattr(behind, "on_event", heard.append)
    events = [GpusRead(gpus=(GPU,)), GpuEvent(index=0, kind="ecc")]
    for event in events:
        on_event((part, behind), event)
    assert heard == events


def test_what_a_node_has_is_told_to_the_launcher_that_watches_the_job_once() -> None:
    part, _ = part_of(sent := list[object](), GPU)
    assert part.may_take_part()
    for _ in range(2):
        part.on_attempt(SimpleNamespace(), a_round())  # type: ignore[arg-type]
    (told,) = (record for record in sent if isinstance(record, HardwareOfNode))
    assert (told.host, told.attempt, told.clock_ahead_s) == ("gpu3", 0, 59.0)
    assert [gpu.uuid for gpu in told.hardware.gpus] == ["GPU-0"]
