"""GPUs are read by the real child process with the real binding, over a fake library (tests/support/fake_nvml.c)."""

from __future__ import annotations

import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.agent import gpu_reader
from ddplaunch.agent.gpu_reader import GpuReader, read_once
from ddplaunch.features.health import gpu_rules
from ddplaunch.protocol.gpus import GpuEvent, GpuReading, GpusRead
from ddplaunch.system.gpus import devices, gpu_child, nvml
from tests.support import fake_nvml
from tests.support.fake_nvml import Says


def test_without_the_library_there_is_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_nvml", lambda: False)
    assert GpuReader.start(print) is None


def test_all_values_of_a_gpu_are_read(driver: Says, watch: Any) -> None:
    driver("gpus 1", "driver 575.51.03", *fake_nvml.healthy(0))
    (gpu,) = watch().read().gpus
    assert gpu == GpuReading(
        index=0,
        uuid="GPU-0000-0",
        name="Fake H100",
        pci_address="00000000:10:00.0",
        driver="575.51.03",
        vbios="96.00.74.00.1A",
        is_mig=False,
        has_display=False,
        memory_bytes=85_899_345_920,
        used_bytes=4_194_304,
        power_limit_w=700.0,
        recovery_action=0,
        uncorrected_rows=0,
        is_remap_pending=False,
        is_remap_failed=False,
        is_sram_worn=False,
        uncorrected_errors=0,
        sram_corrected=0,
        dram_corrected=0,
        is_ecc_on=True,
        is_ecc_wanted=True,
        is_ecc_usual=True,
        pcie_width=16,
        pcie_max_width=16,
        fabric_state=3,
        fabric_status=0,
        fabric_health=0xAAA,
        clock_reasons=1,
        throttled_minutes=0,
        nvlinks=18,
        nvlinks_active=18,
        nvlinks_usual=18,
        nvlink_errors=0,
        nvlink_error_minutes=0,
        temperature_margin_c=45,
    )
    assert gpu_rules.at_start(gpu) == ()


def test_what_a_gpu_does_not_support_is_unknown(driver: Says, watch: Any) -> None:
    driver("gpus 1")
    (gpu,) = watch().read().gpus
    known = {"index", "uuid", "name", "pci_address", "power_limit_w", "clock_reasons", "throttled_minutes"}
    assert {
        name
        for name, value in vars(gpu).items()
        if name not in ("is_mig", "memory_bytes") and value not in (None, "", ())
    } == {
        *known,
        "nvlink_error_minutes",
    }
    assert gpu_rules.at_start(gpu) == ()


def test_an_old_driver_tells_what_it_can(
    driver: Says, watch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml.build(tmp_path / "old", "-DOLD")))
    driver("gpus 1", *fake_nvml.healthy(0), "0 pid 4194304", "event 1 0 8 79")
    watched = watch()
    (gpu,) = watched.read().gpus
    assert (gpu.recovery_action, gpu.is_sram_worn, gpu.fabric_state, gpu.is_ecc_usual) == (0, None, None, None)
    assert (gpu.pids, gpu.memory_bytes, gpu.is_remap_failed) == ((4194304,), 85_899_345_920, False)
    assert watched.event().xid == 79


def test_a_driver_with_the_second_structure_of_the_fabric_is_understood(driver: Says, watch: Any) -> None:
    driver("gpus 1", "fabric 2", "0 fabric 2 0 0")
    assert watch().read().gpus[0].fabric_state == 2


def test_memory_that_the_driver_reserves_is_not_in_use(driver: Says, watch: Any) -> None:
    driver("gpus 1", "0 total 85899345920", "0 used 700000000", "0 reserved 600000000")
    assert watch().read().gpus[0].used_bytes == 100_000_000


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetRemappedRows"])
def test_a_gpu_that_is_lost_is_told_beside_the_others(function: str, driver: Says, watch: Any) -> None:
    driver("gpus 2", f"error {function} 15", f"only {function} 1")
    first, second = watch().read().gpus
    assert (first.error, second.error) == ("", "GPU is lost")


# Later readings, questions and events.


def test_a_reading_is_sent_when_something_has_changed(driver: Says, watch: Any) -> None:
    driver("gpus 1", "0 rows 0 0 0 0", "0 margin 40")
    watched = watch(interval_s=0.02)
    watched.read()
    driver("gpus 1", "0 rows 0 0 0 0", "0 margin 41", "0 pid 12")
    driver("gpus 1", "0 rows 0 0 1 0", "0 margin 42", "0 pid 12")
    changed = watched.read()
    assert changed.gpus[0].is_remap_pending


def test_memory_is_read_when_asked_for(driver: Says, watch: Any) -> None:
    driver("gpus 1", "0 total 85899345920", "0 used 3000000000", "0 pid 4194304")
    watched = watch()
    watched.read()
    memory = GpuReading(index=0, used_bytes=3_000_000_000, memory_bytes=85_899_345_920, pids=(4194304,))
    assert watched.read("memory").gpus == (memory,)


@pytest.mark.parametrize(
    ("event", "kind", "xid"),
    [("8 79", "xid", 79), ("2 0", "ecc", 0), ("16384 0", "unavailable", 0), ("32768 1", "recovery", 0)],
)
def test_an_event_is_told_when_it_happens(event: str, kind: Any, xid: int, driver: Says, watch: Any) -> None:
    driver("gpus 2")
    watched = watch()
    watched.read()
    driver("gpus 2", f"event 1 1 {event}")
    assert watched.event() == GpuEvent(index=1, uuid="GPU-0000-1", kind=kind, xid=xid)


def test_each_of_several_events_is_told(driver: Says, watch: Any) -> None:
    driver("gpus 2", "event 1 0 8 48", "event 2 1 8 45", "event 3 0 8 94")
    watched = watch()
    watched.read()
    told = [watched.event() for _ in range(3)]
    assert [(event.index, event.xid) for event in told] == [(0, 48), (1, 45), (0, 94)]


def test_after_an_event_the_gpus_are_read_at_once(driver: Says, watch: Any) -> None:
    driver("gpus 1", "0 field230 0")
    watched = watch()
    watched.read()
    driver("gpus 1", "0 field230 4", "event 1 0 32768 4")
    watched.event()
    assert watched.read().gpus[0].recovery_action == 4


def test_a_gpu_that_is_lost_during_the_wait_is_read_at_once(driver: Says, watch: Any) -> None:
    driver("gpus 1")
    watched = watch()
    watched.read()
    driver("gpus 1", "error nvmlEventSetWait_v2 15", "error nvmlDeviceGetName 15")
    assert watched.read().gpus[0].error == "GPU is lost"


def test_a_driver_that_hangs_during_the_run_is_told_once(
    driver: Says, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_reader, "SILENCE_S", 0.5)
    driver("gpus 1")
    watched = watch(interval_s=0.02)
    first = watched.read()
    driver("gpus 1", "block nvmlDeviceGetName")
    silent = watched.read()
    assert silent == GpusRead(missing="NVML has not answered for 0.5 s: the GPU driver hangs, or is very slow")
    driver("gpus 1")
    assert watched.read().gpus == first.gpus


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_of_the_run_does_not_end_the_child(number: int, driver: Says, watch: Any) -> None:
    driver("gpus 1")
    watched = watch()
    watched.read()
    watched.reader._process.send_signal(number)
    assert watched.read("memory").missing == ""


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetName"])
def test_the_child_ends_when_its_stdin_is_closed_also_while_the_driver_hangs(
    function: str, driver: Says, watch: Any
) -> None:
    driver("gpus 1", f"block {function}")
    watched = watch()
    watched.reader.close()
    assert watched.reader._process.wait(10) == 0


def test_the_child_finds_its_package_without_the_path_of_its_parent() -> None:
    library = sysconfig.get_path("stdlib")
    command = [sys.executable, "-S", "-I", gpu_child.__file__, "nvml", "60", library, f"{library}/lib-dynload"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.wait(20) == 0
        finally:
            child.kill()
        assert child.stdout
        assert b"No module named 'pynvml'" in child.stdout.read()


def test_clocks_that_the_hardware_lowers_are_counted_in_minutes(driver: Says, watch: Any) -> None:
    driver("gpus 1", "0 clocks 4")
    watched = watch(interval_s=0.01)
    assert watched.read().gpus[0].throttled_minutes == 0
    driver("gpus 1", "0 clocks 68")
    before = watched.until_read(lambda gpu: gpu.throttled_minutes == 5).gpus[0]
    after = watched.until_read(lambda gpu: gpu.throttled_minutes == 6).gpus[0]
    (finding,) = gpu_rules.while_running(before, after)
    assert finding.text == "the hardware has lowered its clocks in 6 of the last 10 minutes"


def test_minutes_with_errors_of_nvlinks_are_counted_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    history = gpu_child._History(minute_s=60)
    for minute in range(60):
        monkeypatch.setattr(gpu_child.time, "monotonic", lambda minute=minute: minute * 60.0)
        for part in range(12):
            gpu = {"index": 0, "nvlink_errors": 7 + min(minute, 20) * 12 + part * (minute < 20)}
            history.add_to(gpu)
        counts.append(gpu["nvlink_error_minutes"])
    assert (counts[0], counts[14], counts[15], max(counts), counts[-1]) == (1, 15, 16, 21, 0)


# What the child says is checked.


def test_a_driver_that_hangs_is_told_in_time_and_read_when_it_goes_on(driver: Says, watch: Any) -> None:
    driver("gpus 1", "block nvmlDeviceGetName")
    started = time.monotonic()
    watched = watch()
    first = watched.read()
    assert first.gpus == ()
    assert first.missing == "NVML has not answered for 2 s: the GPU driver hangs, or is very slow"
    assert time.monotonic() - started < devices.NVML_LIMIT_S + 1.5
    driver("gpus 1")
    later = watched.read()
    assert (len(later.gpus), later.missing) == (1, "")


def test_a_driver_that_is_not_loaded_is_a_reason_and_ends_the_watch(driver: Says, watch: Any) -> None:
    driver("error nvmlInitWithFlags 9")
    watched = watch()
    assert watched.read() == GpusRead(missing="NVML: Driver Not Loaded")
    watched.reader._process.wait(10)
    assert watched.read("memory").missing == "NVML: Driver Not Loaded"


def test_a_killed_child_is_told_once(driver: Says, watch: Any) -> None:
    driver("gpus 1")
    watched = watch()
    watched.read()
    watched.reader._process.kill()
    assert watched.read() == GpusRead(missing="the process that asked NVML ended with -9")


def test_a_wanted_reading_comes_although_nothing_has_changed(driver: Says, watch: Any) -> None:
    driver("gpus 1")
    watched = watch()
    first = watched.read()
    watched.reader.ask("health")
    assert watched.read().gpus == first.gpus


@pytest.mark.parametrize(
    "values",
    ['{"gpus": [{}]}', '{"gpus": [{"index": "x"}]}', '{"gpus": 3}', '{"gpus": [{"index": 0, "name": "\\u001b"}]}', "x"],
)
def test_a_line_that_makes_no_sense_is_a_reason(
    values: str, driver: Says, watch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "child.py").write_text(f'print(\'{{"record": "GpusRead", \' + {values!r}[1:])')
    monkeypatch.setattr(gpu_reader, "_CHILD", str(tmp_path / "child.py"))
    assert watch().read() == GpusRead(missing="the answer of the GPU driver could not be read")


def test_what_the_driver_says_cannot_steer_the_terminal(driver: Says, watch: Any) -> None:
    driver("gpus 1", "0 name \x1b[31mred")
    assert watch().read().gpus[0].name == r"\x1b[31mred"


def test_a_number_that_makes_no_sense_is_unknown(driver: Says, watch: Any) -> None:
    driver("gpus 1", f"0 total {1 << 61}", "0 used 60")
    watched = watch()
    watched.read()
    (found,) = watched.read("usage").gpus
    assert (found.memory_bytes, found.used_bytes) == (0, 60)


def test_usage_is_read_when_it_is_asked_for(driver: Says, watch: Any) -> None:
    driver("gpus 2", *fake_nvml.gpu(0, 91, 40, 412_500), "0 total 80", "0 used 60", "0 clocks 64", "0 temperature 71")
    watched = watch()
    watched.read()
    first, second = watched.read("usage").gpus
    assert first == GpuReading(
        index=0,
        memory_bytes=80,
        used_bytes=60,
        utilization=91,
        memory_utilization=40,
        power_w=412.5,
        temperature_c=71,
        clock_reasons=64,
        throttled="thermal slowdown (hardware)",
    )
    assert (second.index, second.used_bytes, second.temperature_c) == (1, None, None)


def test_usage_of_a_driver_that_fails_is_empty(driver: Says, watch: Any) -> None:
    driver("gpus 1")
    watched = watch()
    watched.read()
    driver("gpus 1", "error nvmlDeviceGetCount_v2 999")
    assert watched.read("usage").gpus == ()


# One question, as for a hang.


@pytest.fixture
def installed(driver: Says, monkeypatch: pytest.MonkeyPatch) -> Says:
    monkeypatch.setattr(devices, "has_nvml", lambda: True)
    return driver


def test_what_a_gpu_does_is_read_with_what_identifies_it(installed: Says) -> None:
    installed("gpus 2", *fake_nvml.gpu(0, 100, 0, 120_500), *fake_nvml.gpu(1, 37, 21, 655_000))
    read = read_once("activity", 5)
    assert read.gpus[0] == GpuReading(
        index=0,
        name="Fake H100",
        uuid="GPU-0000-0",
        pci_address="00000000:10:00.0",
        power_limit_w=700.0,
        utilization=100,
        memory_utilization=0,
        power_w=120.5,
        clock_reasons=0,
    )
    second = read.gpus[1]
    assert (second.index, second.utilization, second.memory_utilization, second.power_w) == (1, 37, 21, 655.0)


@pytest.mark.parametrize(
    ("clocks", "text"),
    [
        (None, ""),
        (0x5, ""),  # Idle, and the power limit: no fault of the GPU.
        (0x48, "thermal slowdown (hardware), hardware slowdown"),
        (0x20, "thermal slowdown (driver)"),
        (0x84, "power brake"),
    ],
)
def test_why_a_gpu_is_throttled(clocks: int | None, text: str) -> None:
    assert nvml.throttled(clocks) == text


@pytest.mark.parametrize(
    ("says", "missing"), [("error nvmlInitWithFlags 9", "NVML: Driver Not Loaded"), ("gpus 0", "NVML knows no GPU")]
)
def test_why_there_are_no_gpus_is_told(says: str, missing: str, installed: Says) -> None:
    installed(says)
    assert read_once("health", 5) == GpusRead(missing=missing)


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetUtilizationRates"])
def test_a_driver_that_hangs_is_told_in_time(function: str, installed: Says) -> None:
    installed("gpus 1", f"block {function}")
    read = read_once("activity", 0.7)
    assert read.missing == "NVML has not answered for 0.7 s: the GPU driver hangs, or is very slow"


def test_without_the_library_there_is_a_reason(
    installed: Says, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / devices.NVML_LIBRARY).write_text("not a library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert read_once("activity", 5).missing == "NVML: NVML Shared Library Not Found"


def test_a_child_that_cannot_be_started_is_a_reason(installed: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/missing")
    missing = "no process could be started to ask the GPU driver: No such file or directory"
    assert read_once("activity", 5) == GpusRead(missing=missing)


def test_only_a_library_that_loads_counts_as_installed(nvml_library: Path, tmp_path: Path) -> None:
    (tmp_path / devices.NVML_LIBRARY).write_text("not a library")
    text = "import sys; from ddplaunch.system.gpus import devices; print(devices.has_nvml(), 'pynvml' in sys.modules)"
    for folder, has_nvml in ((nvml_library, "True"), (tmp_path, "False")):
        command = ["env", f"LD_LIBRARY_PATH={folder}", sys.executable, "-c", text]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{has_nvml} False\n"
