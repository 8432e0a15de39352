"""What an agent makes of its GPUs' readings and events; the driver is not there, its answers are made up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ddplaunch.agent.events import HealthEvent
from ddplaunch.agent.workers.placement import Placement
from ddplaunch.features.health import gpus_of_job
from ddplaunch.features.health.gpus_of_job import GpusOfJob
from ddplaunch.features.health.records import HealthFinding
from ddplaunch.protocol.gpus import GpuEvent, GpuReading, GpusRead, IbPort
from ddplaunch.protocol.results import WorkerExit
from ddplaunch.protocol.specs import AgentSpec, Program

GPUS = tuple(
    GpuReading(index=index, uuid=f"GPU-{index}", pci_address=f"00000000:1{index}:00.0", used_bytes=0)
    for index in (0, 1)
)
FAILED = WorkerExit(0, 0, "gpu3", 100, 1, stopped=False, time_s=0.0, duration_s=1.0)


@pytest.fixture
def sent() -> list[object]:
    return []


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, sent: list[object]) -> GpusOfJob:
    """A node of two GPUs, of which the only worker uses the second one."""
    monkeypatch.setattr(gpus_of_job.GpuReader, "start", lambda _: None)
    return of_job(sent, GPUS)


def of_job(sent: list[object], first: tuple[GpuReading, ...]) -> GpusOfJob:
    program = Program("script", "x.py", (), "python")
    spec = AgentSpec(run_id="run", host="gpu3", program=program, same_python=True, launcher_assigns_rendezvous=True)
    found = GpusOfJob(spec, sent.append, sent.append)
    found.placement = Placement(1, "CUDA_VISIBLE_DEVICES", (("GPU-1",),), None, {})
    found.handle_event(HealthEvent(GpusRead(gpus=first)))
    return found


def blamed(gpus: GpusOfJob) -> str:
    return gpus.blame((FAILED,), lambda *_: True)[0].hardware


def xid(number: int, index: int = 1) -> HealthEvent:
    return HealthEvent(GpuEvent(index=index, uuid=f"GPU-{index}", kind="xid", xid=number))


def test_a_fault_is_told_once_a_minute_and_blamed(gpus: GpusOfJob, sent: list[object]) -> None:
    gpus.handle_event(xid(79))
    gpus.handle_event(xid(79))
    (found,) = sent
    assert isinstance(found, HealthFinding)
    assert found.local_ranks == (0,)
    assert blamed(gpus) == "Xid 79, GPU 1 (GPU-1) has fallen off the bus"


def test_an_old_fault_is_no_cause(gpus: GpusOfJob, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.handle_event(xid(79))
    later = gpus_of_job.time.monotonic() + 60 + gpus._spec.timeouts.shutdown_timeout_s + 1
    monkeypatch.setattr(gpus_of_job.time, "monotonic", lambda: later)
    assert blamed(gpus) == ""


def test_a_gpu_that_is_lost_keeps_its_uuid(gpus: GpusOfJob, sent: list[object]) -> None:
    """NVML tells only the index of a GPU that it has lost; the job has chosen its GPU by UUID."""
    gpus.handle_event(HealthEvent(GpusRead(gpus=(GPUS[0], GpuReading(index=1, error="GPU is lost")))))
    (found,) = sent
    assert isinstance(found, HealthFinding)
    assert (found.rule, found.uuid) == ("lost", "GPU-1")
    assert blamed(gpus) == "GPU 1 (GPU-1): the driver cannot use it: GPU is lost"


def test_what_refused_a_gpu_at_the_start_explains_a_failure(gpus: GpusOfJob, sent: list[object]) -> None:
    """With --health warn the job has started all the same."""
    sick = of_job(sent, (GPUS[0], replace(GPUS[1], is_remap_failed=True, uncorrected_errors=3)))
    assert blamed(sick) == "GPU 1 (GPU-1): a row of its memory could not be remapped"
    worn = of_job(sent, (GPUS[0], replace(GPUS[1], uncorrected_errors=3)))
    assert blamed(worn) == "", "the GPU was like that before"


def test_each_port_is_told(gpus: GpusOfJob, sent: list[object]) -> None:
    ports = tuple(IbPort(name=f"mlx5_{number}:1", state="ACTIVE") for number in (0, 1))
    gpus.handle_event(HealthEvent(GpusRead(gpus=GPUS, ports=ports)))
    for _ in range(2):
        gpus.handle_event(HealthEvent(GpusRead(gpus=GPUS, ports=tuple(replace(port, state="DOWN") for port in ports))))
    told = [finding.text for finding in sent if isinstance(finding, HealthFinding)]
    assert [text.partition(": ")[0] for text in told] == ["mlx5_0:1", "mlx5_1:1"]


def test_without_nvml_the_kernels_log_is_read(gpus: GpusOfJob, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = (("0000:10:00", 48), ("0000:11:00", 79))
    monkeypatch.setattr(gpus_of_job.kernel_log, "recent_xids", lambda _: logged)
    assert blamed(gpus) == "", "NVML has answered"
    gpus.handle_event(HealthEvent(GpusRead(missing="NVML has not answered")))
    assert blamed(gpus) == "Xid 79, GPU 1 (GPU-1) has fallen off the bus"


def test_usage_is_kept_without_waking_the_agent(gpus: GpusOfJob, sent: list[object]) -> None:
    """The next question follows when the last one is answered: a driver that hangs gets no more of them."""
    asked: list[bool] = []
    gpus._reader = SimpleNamespace(ask=lambda _: asked.append(True))  # type: ignore[assignment]
    assert (gpus.next_usage(), gpus.next_usage(), asked) == ({}, {}, [True])
    usage = GpuReading(index=1, utilization=97)
    gpus._on_answer_in_thread(GpusRead(question="usage", gpus=(usage,)))
    assert (gpus.next_usage(), asked, sent) == ({1: usage}, [True, True], [])


@pytest.mark.parametrize(
    ("devices", "rows"),
    [((("1",), ("0",)), [1, 0]), ((("0", "1"), ("0", "1")), [0, 1]), ((("0", "1"), ("7",)), [0, None])],
)
def test_a_worker_has_the_row_of_its_first_gpu(
    gpus: GpusOfJob, devices: tuple[tuple[str, ...], ...], rows: list[int | None]
) -> None:
    gpus.placement = Placement(2, "CUDA_VISIBLE_DEVICES", devices, None, {})
    gpus.handle_event(HealthEvent(GpusRead(gpus=GPUS)))
    assert [gpus.row_of_worker(rank) for rank in (0, 1)] == rows
