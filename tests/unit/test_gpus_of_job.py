"""What an agent knows of the GPUs of its workers; the driver is not there, its answers are made up."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from ddplaunch.agent.workers.start_plan import Placement
from ddplaunch.features.gpus import reader
from ddplaunch.features.gpus.agent import GpusOfJob
from ddplaunch.features.gpus.records import GpuReading, GpusRead
from tests.support.configs import agent_spec

GPUS = (GpuReading(index=0, uuid="GPU-0"), GpuReading(index=1, uuid="GPU-1"))


@pytest.fixture
def sent() -> list[object]:
    return []


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, sent: list[object]) -> GpusOfJob:
    """A node of two GPUs."""
    monkeypatch.setattr(reader.GpuReader, "start", lambda _: SimpleNamespace(ask=print))
    return GpusOfJob(agent_spec(), sent.append)


def test_only_the_gpus_of_workers_are_known(gpus: GpusOfJob) -> None:
    gpus.placement = Placement(1, "CUDA_VISIBLE_DEVICES", (("GPU-1",),), {})
    gpus.on_event(GpusRead(gpus=GPUS))
    assert (gpus.gpus, gpus.is_read) == (GPUS[1:], True)
    gpus.on_event(GpusRead(missing="NVML has not answered"))
    assert gpus.gpus == GPUS[1:]


def test_usage_is_kept_without_waking_the_agent(gpus: GpusOfJob, sent: list[object]) -> None:
    """The next question follows when the last one is answered: a driver that hangs gets no more of them."""
    asked: list[bool] = []
    gpus._reader = SimpleNamespace(ask=lambda _: asked.append(True))  # type: ignore[assignment]
    assert (gpus.next_usage(), gpus.next_usage(), asked) == ({}, {}, [True])
    assert gpus.usage == (-math.inf, {})
    usage = GpuReading(index=1, utilization=97)
    gpus._on_answer_in_thread(GpusRead(question="usage", gpus=(usage,)))
    before = time.monotonic()
    assert (gpus.next_usage(), asked, sent) == ({1: usage}, [True, True], [])
    for _ in range(2):  # Other parts read it, and ask nothing.
        answered_at, found = gpus.usage
        assert 0 <= before - answered_at < 60
        assert (found, len(asked)) == ({1: usage}, 2)


@pytest.mark.parametrize(
    ("devices", "rows"),
    [((("1",), ("0",)), [1, 0]), ((("0", "1"), ("0", "1")), [0, 1]), ((("0", "1"), ("7",)), [0, None])],
)
def test_a_worker_has_the_row_of_its_first_gpu(
    gpus: GpusOfJob, devices: tuple[tuple[str, ...], ...], rows: list[int | None]
) -> None:
    gpus.placement = Placement(2, "CUDA_VISIBLE_DEVICES", devices, {})
    gpus.on_event(GpusRead(gpus=GPUS))
    assert [gpus.row_of_worker(rank) for rank in (0, 1)] == rows
