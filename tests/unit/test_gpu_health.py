"""The watch of GPUs: the real child process with the real binding, over a fake library of the driver."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.health import gpu_rules
from ddplaunch.system.gpus import gpu_health, gpu_history, nvml
from ddplaunch.system.gpus.gpu_health import (
    GpuEvent,
    GpuEvents,
    GpuHealth,
    GpuMemory,
    GpusRead,
    GpuUsage,
    GpuWatch,
    MemoryRead,
    UsageRead,
)
from tests.support import fake_nvml
from tests.support.fake_nvml import Says


def test_without_the_library_there_is_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "is_installed", lambda: False)
    assert GpuWatch.start(print) is None


def test_the_first_reading_has_all_gpus(driver: Says, watch: Any) -> None:
    driver("gpus 2", "0 name NVIDIA H100 80GB HBM3", "0 limit 700000")
    first = watch().next(GpusRead)
    assert (first.is_first, first.missing) == (True, "")
    assert [(gpu.index, gpu.uuid, gpu.name, gpu.power_limit_w) for gpu in first.gpus] == [
        (0, "GPU-0000-0", "NVIDIA H100 80GB HBM3", 700.0),
        (1, "GPU-0000-1", "Fake H100", 0.0),
    ]


def test_all_values_of_a_gpu_are_read(driver: Says, watch: Any) -> None:
    driver("gpus 1", "driver 575.51.03", *fake_nvml.healthy(0))
    (gpu,) = watch().next(GpusRead).gpus
    assert gpu == GpuHealth(
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
    (gpu,) = watch().next(GpusRead).gpus
    known = {"index", "uuid", "name", "pci_address", "power_limit_w", "clock_reasons", "throttled_minutes"}
    assert {name for name, value in vars(gpu).items() if value not in (None, "", ())} == {
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
    (gpu,) = watched.next(GpusRead).gpus
    assert (gpu.recovery_action, gpu.is_sram_worn, gpu.fabric_state, gpu.is_ecc_usual) == (0, None, None, None)
    assert (gpu.pids, gpu.memory_bytes, gpu.is_remap_failed) == ((4194304,), 85_899_345_920, False)
    assert watched.next(GpuEvents).events[0].xid == 79


def test_a_driver_with_the_second_structure_of_the_fabric_is_understood(driver: Says, watch: Any) -> None:
    driver("gpus 1", "fabric 2", "0 fabric 2 0 0")
    assert watch().next(GpusRead).gpus[0].fabric_state == 2


def test_memory_that_the_driver_reserves_is_not_in_use(driver: Says, watch: Any) -> None:
    driver("gpus 1", "0 total 85899345920", "0 used 700000000", "0 reserved 600000000")
    assert watch().next(GpusRead).gpus[0].used_bytes == 100_000_000


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetRemappedRows"])
def test_a_gpu_that_is_lost_is_told_beside_the_others(function: str, driver: Says, watch: Any) -> None:
    driver("gpus 2", f"error {function} 15", f"only {function} 1")
    first, second = watch().next(GpusRead).gpus
    assert (first.error, second.error) == ("", "GPU is lost")


# Later readings, questions and events.


def test_a_reading_is_sent_when_something_has_changed(driver: Says, watch: Any) -> None:
    driver("gpus 1", "0 rows 0 0 0 0", "0 margin 40")
    watched = watch(interval_s=0.02)
    watched.next(GpusRead)
    driver("gpus 1", "0 rows 0 0 0 0", "0 margin 41", "0 pid 12")
    driver("gpus 1", "0 rows 0 0 1 0", "0 margin 42", "0 pid 12")
    changed = watched.next(GpusRead)
    assert (changed.gpus[0].is_remap_pending, changed.is_first) == (True, False)


def test_memory_is_read_when_asked_for(driver: Says, watch: Any) -> None:
    driver("gpus 1", "0 total 85899345920", "0 used 3000000000", "0 pid 4194304")
    watched = watch()
    watched.next(GpusRead)
    watched.watch.ask_memory()
    memory = GpuMemory(index=0, used_bytes=3_000_000_000, memory_bytes=85_899_345_920, pids=(4194304,))
    assert watched.next(MemoryRead) == MemoryRead((memory,))


@pytest.mark.parametrize(
    ("event", "kind", "xid"),
    [("8 79", "xid", 79), ("2 0", "ecc", 0), ("16384 0", "unavailable", 0), ("32768 1", "recovery", 0)],
)
def test_an_event_is_told_when_it_happens(event: str, kind: Any, xid: int, driver: Says, watch: Any) -> None:
    driver("gpus 2")
    watched = watch()
    watched.next(GpusRead)
    driver("gpus 2", f"event 1 1 {event}")
    assert watched.next(GpuEvents) == GpuEvents((GpuEvent(index=1, uuid="GPU-0000-1", kind=kind, xid=xid),))


def test_each_of_several_events_is_told(driver: Says, watch: Any) -> None:
    driver("gpus 2", "event 1 0 8 48", "event 2 1 8 45", "event 3 0 8 94")
    watched = watch()
    watched.next(GpusRead)
    told = [watched.next(GpuEvents).events[0] for _ in range(3)]
    assert [(event.index, event.xid) for event in told] == [(0, 48), (1, 45), (0, 94)]


def test_after_an_event_the_gpus_are_read_at_once(driver: Says, watch: Any) -> None:
    driver("gpus 1", "0 field230 0")
    watched = watch()
    watched.next(GpusRead)
    driver("gpus 1", "0 field230 4", "event 1 0 32768 4")
    watched.next(GpuEvents)
    assert watched.next(GpusRead).gpus[0].recovery_action == 4


def test_a_gpu_that_is_lost_during_the_wait_is_read_at_once(driver: Says, watch: Any) -> None:
    driver("gpus 1")
    watched = watch()
    watched.next(GpusRead)
    driver("gpus 1", "error nvmlEventSetWait_v2 15", "error nvmlDeviceGetName 15")
    assert watched.next(GpusRead).gpus[0].error == "GPU is lost"


def test_a_driver_that_hangs_during_the_run_is_told_once(
    driver: Says, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_health, "SILENCE_S", 0.5)
    driver("gpus 1")
    watched = watch(interval_s=0.02)
    first = watched.next(GpusRead)
    driver("gpus 1", "block nvmlDeviceGetName")
    silent = watched.next(GpusRead)
    assert silent == GpusRead((), "NVML has not answered for 0.5 s: the GPU driver hangs, or is very slow")
    driver("gpus 1")
    assert watched.next(GpusRead) == GpusRead(first.gpus)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_of_the_run_does_not_end_the_child(number: int, driver: Says, watch: Any) -> None:
    driver("gpus 1")
    watched = watch()
    watched.next(GpusRead)
    watched.watch._process.send_signal(number)
    watched.watch.ask_memory()
    assert watched.next(MemoryRead).missing == ""


def test_the_child_ends_when_its_stdin_is_closed_also_while_the_driver_hangs(driver: Says, watch: Any) -> None:
    driver("gpus 1", "block nvmlDeviceGetName")
    watched = watch()
    watched.watch.close()
    assert watched.watch._process.wait(10) == 0


def test_clocks_that_the_hardware_lowers_are_counted_in_minutes(driver: Says, watch: Any) -> None:
    driver("gpus 1", "0 clocks 4")
    watched = watch(interval_s=0.01)
    assert watched.next(GpusRead).gpus[0].throttled_minutes == 0
    driver("gpus 1", "0 clocks 68")
    before = watched.until_read(lambda gpu: gpu.throttled_minutes == 5).gpus[0]
    after = watched.until_read(lambda gpu: gpu.throttled_minutes == 6).gpus[0]
    (finding,) = gpu_rules.while_running(before, after)
    assert finding.text == "the hardware has lowered its clocks in 6 of the last 10 minutes"


def test_minutes_with_errors_of_nvlinks_are_counted_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    history = gpu_history.History(minute_s=60)
    for minute in range(60):
        monkeypatch.setattr(gpu_history.time, "monotonic", lambda minute=minute: minute * 60.0)
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
    first = watched.next(GpusRead)
    assert (first.gpus, first.is_first) == ((), True)
    assert first.missing == "NVML has not answered for 2 s: the GPU driver hangs, or is very slow"
    assert time.monotonic() - started < nvml.LIMIT_S + 1.5
    driver("gpus 1")
    later = watched.next(GpusRead)
    assert (len(later.gpus), later.missing, later.is_first) == (1, "", False)


def test_a_driver_that_is_not_loaded_is_a_reason_and_ends_the_watch(driver: Says, watch: Any) -> None:
    driver("error nvmlInitWithFlags 9")
    watched = watch()
    assert watched.next(GpusRead) == GpusRead((), "NVML: Driver Not Loaded", is_first=True)
    watched.watch._process.wait(10)
    watched.watch.ask_memory()
    assert watched.next(MemoryRead) == MemoryRead((), "NVML: Driver Not Loaded")


def test_a_killed_child_is_told_once(driver: Says, watch: Any) -> None:
    driver("gpus 1")
    watched = watch()
    watched.next(GpusRead)
    watched.watch._process.kill()
    assert watched.next(GpusRead) == GpusRead((), "the process that asked NVML ended with -9")


def test_a_wanted_reading_comes_although_nothing_has_changed(driver: Says, watch: Any) -> None:
    driver("gpus 1")
    watched = watch()
    first = watched.next(GpusRead)
    watched.watch.ask_health()
    assert watched.next(GpusRead) == GpusRead(first.gpus)


@pytest.mark.parametrize("text", ["x", "[]", "3", '{"gpus": [{}]}', '{"gpus": [{"index": "x"}]}', '{"memory": 3}'])
def test_a_line_that_makes_no_sense_is_a_reason(text: str) -> None:
    assert gpu_health._answer(text.encode()) == GpusRead((), nvml.UNREADABLE)


def test_what_the_child_says_cannot_steer_the_terminal() -> None:
    answer = gpu_health._answer(b'{"gpus": [{"index": 0, "name": "\\u001b[31mred"}]}')
    assert isinstance(answer, GpusRead)
    assert answer.gpus[0].name == r"\x1b[31mred"


def test_usage_is_read_when_it_is_asked_for(driver: Says, watch: Any) -> None:
    driver("gpus 2", *fake_nvml.gpu(0, 91, 40, 412_500), "0 total 80", "0 used 60", "0 clocks 64", "0 temperature 71")
    watched = watch()
    watched.next(GpusRead)
    watched.watch.ask_usage()
    first, second = watched.next(UsageRead).gpus
    assert first == GpuUsage(
        index=0, utilization=91, used_bytes=60, power_mw=412_500, temperature_c=71, clock_reasons=64
    )
    assert (second.index, second.used_bytes, second.temperature_c) == (1, None, None)


def test_usage_of_a_driver_that_fails_is_empty(driver: Says, watch: Any) -> None:
    driver("gpus 1")
    watched = watch()
    watched.next(GpusRead)
    driver("gpus 1", "error nvmlDeviceGetCount_v2 999")
    watched.watch.ask_usage()
    assert watched.next(UsageRead).gpus == ()
