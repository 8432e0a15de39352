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
from tests.support.configs import agent_spec

GPUS = tuple(
    GpuReading(index=index, uuid=f"GPU-{index}", pci_address=f"00000000:1{index}:00.0", used_bytes=0)
    for index in (0, 1)
)
FAILED = WorkerExit(0, 0, "gpu3", 100, 1, stopped=False, time_s=0.0, duration_s=1.0)


@pytest.fixture
def sent() -> list[object]:
    return []


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, sent: list[object]) -> GpuFaults:
    """A node of two GPUs, of which the only worker uses the second one."""
    monkeypatch.setattr(reader.GpuReader, "start", lambda _: None)
    return of_job(sent, GPUS)


def of_job(sent: list[object], first: tuple[GpuReading, ...]) -> GpuFaults:
    spec = agent_spec(one_launcher_leads=True)
    gpus = GpusOfJob(spec, sent.append)
    gpus.placement = Placement(1, "CUDA_VISIBLE_DEVICES", (("GPU-1",),), None, {})
    faults = GpuFaults(gpus, spec, sent.append)
    hear(faults, GpusRead(gpus=first))
    return faults


def hear(faults: GpuFaults, answer: GpusRead | GpuEvent) -> None:
    """As the agent does with an answer of the driver."""
    if isinstance(answer, GpusRead):
        faults.gpus.on_event(answer)
    faults.on_answer(answer)


def blamed(faults: GpuFaults) -> str:
    return faults.blame((FAILED,), lambda *_: True)[0].hardware


def xid(number: int, index: int = 1) -> GpuEvent:
    return GpuEvent(index=index, uuid=f"GPU-{index}", kind="xid", xid=number)


def test_a_fault_is_told_once_a_minute_and_blamed(faults: GpuFaults, sent: list[object]) -> None:
    hear(faults, xid(79))
    hear(faults, xid(79))
    (found,) = sent
    assert isinstance(found, HealthFinding)
    assert found.local_ranks == (0,)
    assert blamed(faults) == "Xid 79, GPU 1 (GPU-1) has fallen off the bus"


def test_an_old_fault_is_no_cause(faults: GpuFaults, monkeypatch: pytest.MonkeyPatch) -> None:
    hear(faults, xid(79))
    later = gpu_faults.time.monotonic() + 60 + faults._spec.timeouts.shutdown_timeout_s + 1
    monkeypatch.setattr(gpu_faults.time, "monotonic", lambda: later)
    assert blamed(faults) == ""


def test_a_gpu_that_is_lost_keeps_its_uuid(faults: GpuFaults, sent: list[object]) -> None:
    """NVML tells only the index of a GPU that it has lost; the job has chosen its GPU by UUID."""
    hear(faults, GpusRead(gpus=(GPUS[0], GpuReading(index=1, error="GPU is lost"))))
    (found,) = sent
    assert isinstance(found, HealthFinding)
    assert (found.rule, found.uuid) == ("lost", "GPU-1")
    assert blamed(faults) == "GPU 1 (GPU-1): the driver cannot use it: GPU is lost"


def test_what_refused_a_gpu_at_the_start_explains_a_failure(faults: GpuFaults, sent: list[object]) -> None:
    """With --health warn the job has started all the same."""
    sick = of_job(sent, (GPUS[0], replace(GPUS[1], is_remap_failed=True, uncorrected_errors=3)))
    assert blamed(sick) == "GPU 1 (GPU-1): a row of its memory could not be remapped"
    worn = of_job(sent, (GPUS[0], replace(GPUS[1], uncorrected_errors=3)))
    assert blamed(worn) == "", "the GPU was like that before"


def test_each_port_is_told(faults: GpuFaults, sent: list[object]) -> None:
    ports = tuple(IbPort(name=f"mlx5_{number}:1", state="ACTIVE") for number in (0, 1))
    hear(faults, GpusRead(gpus=GPUS, ports=ports))
    for _ in range(2):
        hear(faults, GpusRead(gpus=GPUS, ports=tuple(replace(port, state="DOWN") for port in ports)))
    told = [finding.text for finding in sent if isinstance(finding, HealthFinding)]
    assert [text.partition(": ")[0] for text in told] == ["mlx5_0:1", "mlx5_1:1"]


def test_a_port_that_is_down_at_the_start_is_told_after_a_late_answer(faults: GpuFaults, sent: list[object]) -> None:
    late = GpuFaults(faults.gpus, faults._spec, sent.append)
    up = [IbPort(name=f"mlx5_{number}:1", state="ACTIVE") for number in range(3)]
    hear(late, GpusRead(missing="NVML has not answered"))
    hear(late, GpusRead(ports=(*up, IbPort(name="mlx5_3:1", state="DOWN"))))
    assert "ib-down" in {finding.rule for finding in sent if isinstance(finding, HealthFinding)}


def test_without_nvml_the_kernels_log_is_read(faults: GpuFaults, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = (("0000:10:00", 48), ("0000:11:00", 79))
    monkeypatch.setattr(gpu_faults.gpu_events, "recent_xids", lambda _: logged)
    assert blamed(faults) == "", "NVML has answered"
    hear(faults, GpusRead(missing="NVML has not answered"))
    assert blamed(faults) == "Xid 79, GPU 1 (GPU-1) has fallen off the bus"


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
