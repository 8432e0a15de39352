"""What an agent makes of its GPUs' readings and events; the driver is not there, its answers are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.agent.workers.start_plan import Placement
from ddplaunch.features.gpus import reader
from ddplaunch.features.gpus.agent import GpusOfJob
from ddplaunch.features.gpus.records import GpuEvent, GpuReading, GpusRead, IbPort
from ddplaunch.features.health import gpu_faults
from ddplaunch.features.health.gpu_faults import GpuFaults, await_free_memory
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.protocol.results import HealthFinding, WorkerExit
from tests.support import golden
from tests.support.configs import agent_spec

GPUS = tuple(
    GpuReading(index=index, uuid=f"GPU-{index}", pci_address=f"00000000:1{index}:00.0", used_bytes=0)
    for index in (0, 1)
)
FAILED = WorkerExit(0, 0, "gpu3", 100, 1, stopped=False, time_s=0.0, duration_s=1.0)


class Faults:
    """A node of two GPUs, of which the only worker uses the second one. The methods are the steps of a story."""

    def __init__(self, patch: pytest.MonkeyPatch, first: str) -> None:
        """``first``: what the driver says of the second GPU at the start."""
        patch.setattr(reader.GpuReader, "start", lambda _: None)
        self.said: list[str] = []
        self._patch, self._spec = patch, agent_spec(one_launcher_leads=True)
        self._gpus = GpusOfJob(self._spec, self._tell)
        self._gpus.placement = Placement(1, "CUDA_VISIBLE_DEVICES", (("GPU-1",),), {})
        self._faults = GpuFaults(self._gpus, self._spec, self._tell)
        self._hear(GpusRead(gpus=(GPUS[0], replace(GPUS[1], **golden.keywords(first)))))

    def _tell(self, record: object) -> None:
        if isinstance(record, HealthFinding):
            self.said.append(f"{record.rule}, local ranks {record.local_ranks} {record.uuid}: {record.text}")

    def _hear(self, answer: GpusRead | GpuEvent) -> None:
        """As the agent does with an answer of the driver."""
        if isinstance(answer, GpusRead):
            self._gpus.on_event(answer)
        self._faults.on_answer(answer)

    def xid(self, number: str) -> None:
        self._hear(GpuEvent(index=1, uuid="GPU-1", kind="xid", xid=int(number)))

    def lost(self) -> None:
        """NVML tells only the index of a GPU that it has lost; the job has chosen its GPU by UUID."""
        self._hear(GpusRead(gpus=(GPUS[0], GpuReading(index=1, error="GPU is lost"))))

    def ports(self, *states: str) -> None:
        ports = tuple(IbPort(name=f"mlx5_{number}:1", state=state) for number, state in enumerate(states))
        self._hear(GpusRead(gpus=GPUS, ports=ports))

    def activity(self) -> None:
        """Another part has asked."""
        self._hear(GpusRead(question="activity", gpus=GPUS))

    def begins(self) -> None:
        """No answer has come until the workers start."""
        self._faults = GpuFaults(self._gpus, self._spec, self._tell)

    def no_nvml(self) -> None:
        self._hear(GpusRead(missing="NVML has not answered"))

    def logged(self) -> None:
        """By the kernel: errors of both GPUs."""
        found = (("0000:10:00", 48), ("0000:11:00", 79))
        self._patch.setattr(gpu_faults.gpu_events, "recent_xids", lambda _: found)

    def later(self) -> None:
        """So much that what was is no cause of what is."""
        now = gpu_faults.time.monotonic() + 60 + self._spec.timeouts.shutdown_timeout_s + 1
        self._patch.setattr(gpu_faults.time, "monotonic", lambda: now)

    def fails(self) -> None:
        """The worker does."""
        (exit_,) = self._faults.blame((FAILED,), lambda *_: True)
        self.said.append(f"because of {exit_.hardware or 'itself'}")


def test_which_faults_are_told_and_blamed() -> None:
    """A story is a sentence, what the driver says of the GPU at the start, and steps."""

    def story(text: str) -> str:
        _, first, steps = text.split(": ")
        with pytest.MonkeyPatch.context() as patch:
            return golden.play(Faults(patch, first), steps)

    golden.check_pages("gpu_faults", story)


# Between attempts: the wait for free memory ends when it is free, when its time is over, or when nobody answers. Time
# is made up.

MB = 1 << 20
BEFORE = 1000 * MB


class Node:
    """A node with one GPU, of which ``used`` says how much is in use at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, used: Callable[[float], int | None]) -> None:
        self.now, self.sent, self.is_stopping = 0.0, list[Notice](), False
        self._used = used
        self.gpus: Any = SimpleNamespace(used_at_start={0: BEFORE}, memory=None, ask_memory=self._ask_memory)
        monkeypatch.setattr(gpu_faults.time, "monotonic", lambda: self.now)

    def _ask_memory(self) -> None:
        used = self._used(self.now)
        gpus = (GpuReading(index=0, used_bytes=used, pids=(1 << 22,)),)
        self.gpus.memory = None if used is None else gpus

    def _wait(self, done: Callable[[], bool], deadline: float) -> bool:
        if not done():
            self.now = deadline
        return done()

    def wait(self) -> float:
        """Seconds until the next attempt may start."""
        outbox = SimpleNamespace(send=self.sent.append)
        node: Any = SimpleNamespace(
            spec=agent_spec(host="gpu3"), outbox=outbox, wait=self._wait, is_stopping=lambda: self.is_stopping
        )
        await_free_memory(self.gpus, node)
        return self.now


@pytest.mark.parametrize("used", [0, BEFORE, BEFORE + 512 * MB])
def test_memory_of_others_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, used: int) -> None:
    node = Node(monkeypatch, lambda _: used)
    assert (node.wait(), node.sent) == (0.0, [])


def test_after_its_limit_it_says_who_holds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, lambda _: 40 << 30)
    assert 50.0 <= node.wait() <= 50.5
    waits, ends = node.sent
    in_use = f"40 GB of GPU 0 (held by pid {1 << 22}) on gpu3 is still in use"
    assert waits == Notice(f"{in_use}; the workers start when it is free")
    assert ends == Notice(f"after 50 s {in_use}; the workers start all the same", -1)


def test_a_driver_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Node(monkeypatch, lambda _: None).wait() <= 2.0


def test_a_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, lambda _: 40 << 30)
    node.is_stopping = True
    assert node.wait() <= 2.0
