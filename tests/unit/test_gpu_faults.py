"""What an agent makes of its GPUs' readings and events; the driver is not there, its answers are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddplaunch.agent import gpus_of_job
from ddplaunch.agent.gpus_of_job import GpusOfJob
from ddplaunch.agent.workers.placement import Placement
from ddplaunch.features.health import gpu_faults
from ddplaunch.features.health.gpu_faults import GpuFaults
from ddplaunch.protocol.gpus import GpuEvent, GpuReading, GpusRead, HealthFinding, IbPort
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
def faults(monkeypatch: pytest.MonkeyPatch, sent: list[object]) -> GpuFaults:
    """A node of two GPUs, of which the only worker uses the second one."""
    monkeypatch.setattr(gpus_of_job.GpuReader, "start", lambda _: None)
    return of_job(sent, GPUS)


def of_job(sent: list[object], first: tuple[GpuReading, ...]) -> GpuFaults:
    program = Program("script", "x.py", (), "python")
    spec = AgentSpec(run_id="run", host="gpu3", program=program, same_python=True, launcher_assigns_rendezvous=True)
    gpus = GpusOfJob(spec, sent.append)
    gpus.placement = Placement(1, "CUDA_VISIBLE_DEVICES", (("GPU-1",),), None, {})
    faults = GpuFaults(gpus, spec, sent.append)
    hear(faults, GpusRead(gpus=first))
    return faults


def hear(faults: GpuFaults, answer: GpusRead | GpuEvent) -> None:
    """As the agent does with an answer of the driver."""
    if isinstance(answer, GpusRead):
        faults.gpus.on_read(answer)
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


def test_without_nvml_the_kernels_log_is_read(faults: GpuFaults, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = (("0000:10:00", 48), ("0000:11:00", 79))
    monkeypatch.setattr(gpu_faults.kernel_log, "recent_xids", lambda _: logged)
    assert blamed(faults) == "", "NVML has answered"
    hear(faults, GpusRead(missing="NVML has not answered"))
    assert blamed(faults) == "Xid 79, GPU 1 (GPU-1) has fallen off the bus"
