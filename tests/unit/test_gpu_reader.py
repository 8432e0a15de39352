"""GPUs are read by the real child process with the real binding, over a fake library (tests/support/fake_nvml.c)."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.features.gpus import child, reader
from ddplaunch.features.gpus.reader import GpuReader, read_once
from ddplaunch.features.gpus.records import GpuReading, GpusRead
from ddplaunch.features.health.rules import at_start, while_running
from ddplaunch.system import devices
from tests.support import fake_nvml, golden
from tests.support.fake_nvml import Says
from tests.support.gpus import changed


def test_without_the_library_there_is_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_nvml", lambda: False)
    assert GpuReader.start(print) is None


class Story:
    """A driver and its reader. The methods are the steps."""

    def __init__(self, driver: Says, watch: Any) -> None:
        self._driver, self._watch = driver, watch
        self.watched: Any = None

    def says(self, text: str) -> str:
        """What the driver says from now on."""
        lines = text.encode().decode("unicode_escape").split(" / ")
        found = (fake_nvml.healthy(0) if line == "healthy" else [line] for line in lines)
        self._driver(*(line for group in found for line in group))
        return ""

    def start(self, interval_s: str) -> str:
        self.watched = self._watch(interval_s=float(interval_s or 60))
        return self.read("")

    def read(self, question: str) -> str:
        found = self.watched.read(question or "health")
        rules = [finding.rule for gpu in found.gpus for finding in at_start(gpu)] if not question else []
        return "\n".join([*map(changed, found.gpus), *([found.missing] if found.missing else []), *rules])

    def wanted(self, _: str) -> str:
        self.watched.reader.ask("health")
        return self.read("")

    def event(self, _: str) -> str:
        return str(self.watched.event())

    def over(self, _: str) -> str:
        """The child ends."""
        return f"exit code {self.watched.reader._process.wait(10)}"

    def once(self, question: str) -> str:
        """One question, as for a hang."""
        found = read_once(question, 60)  # type: ignore[arg-type]
        return "\n".join([*map(changed, found.gpus), *([found.missing] if found.missing else [])])

    def play(self, step: str) -> str:
        word, _, rest = step.partition(" ")
        return "\n    ".join(filter(None, [step, *getattr(self, word)(rest).splitlines()]))


def test_what_the_driver_says_is_read(driver: Says, watch: Any) -> None:
    def told(story: str) -> str:
        played = Story(driver, watch)
        steps = [played.play(step) for step in story.split("; ")]
        if played.watched:
            played.watched.reader.close()
        return "\n".join(steps)

    golden.check_pages("gpu_reader", told)


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


def test_a_driver_that_hangs_during_the_run_is_told_once(
    driver: Says, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, silences = reader._lines, itertools.count()

    def counted(*args: Any) -> Iterator[bytes | None]:
        for line in lines(*args):
            yield line
            if line is None and next(silences) == 1:
                is_silent_again.set()

    is_silent_again = threading.Event()
    monkeypatch.setattr(reader, "SILENCE_S", 0.5)
    monkeypatch.setattr(reader, "_lines", counted)
    driver("gpus 1")
    watched = watch(interval_s=0.02)
    first = watched.read()
    driver("gpus 1", "block nvmlDeviceGetName")
    silent = watched.read()
    assert is_silent_again.wait(60)
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
    command = [sys.executable, "-S", "-I", child.__file__, "nvml", "60", library, f"{library}/lib-dynload"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()
        assert process.stdout
        assert b"No module named 'pynvml'" in process.stdout.read()


def test_clocks_that_the_hardware_lowers_are_counted_in_minutes(driver: Says, watch: Any) -> None:
    driver("gpus 1", "0 clocks 4")
    watched = watch(interval_s=0.01)
    assert watched.read().gpus[0].throttled_minutes == 0
    driver("gpus 1", "0 clocks 68")
    before = watched.until_read(lambda gpu: gpu.throttled_minutes == 5).gpus[0]
    after = watched.until_read(lambda gpu: gpu.throttled_minutes == 6).gpus[0]
    (finding,) = while_running(before, after)
    assert finding.text == "the hardware has lowered its clocks in 6 of the last 10 minutes"


def test_minutes_with_errors_of_nvlinks_are_counted_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    history = child._History(minute_s=60)
    for minute in range(60):
        monkeypatch.setattr(child.time, "monotonic", lambda minute=minute: minute * 60.0)
        for part in range(12):
            gpu = {"index": 0, "nvlink_errors": 7 + min(minute, 20) * 12 + part * (minute < 20)}
            history.add_to(gpu)
        counts.append(gpu["nvlink_error_minutes"])
    assert (counts[0], counts[14], counts[15], max(counts), counts[-1]) == (1, 15, 16, 21, 0)


LATE_IMPORT = """
class Late:
    def find_spec(name, *_):
        if name == "pynvml":
            wait()
sys.meta_path.insert(0, Late)
"""


@pytest.mark.parametrize("waits", ["wait()", LATE_IMPORT], ids=["start", "import"])
def test_a_child_that_starts_late_is_no_word_about_the_driver(
    waits: str, driver: Says, watch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (go := tmp_path / "go").touch()
    late = tmp_path / "late.py"
    wait = f"def wait():\n    while os.path.exists({str(go)!r}):\n        time.sleep(0.01)\n"
    run = f"runpy.run_path({reader._CHILD!r}, run_name='__main__')"
    late.write_text(f"import os, runpy, sys, time\n{wait}{waits}\n{run}")
    monkeypatch.setattr(reader, "_CHILD", str(late))
    monkeypatch.setattr(reader, "_CHILD_STARTS_S", 0.5)
    driver("gpus 1")
    watched = watch()
    assert watched.read() == GpusRead(missing="the process that asks NVML has not started for 0.5 s")
    go.unlink()
    assert len(watched.read().gpus) == 1


def test_a_killed_child_is_told_once(driver: Says, watch: Any) -> None:
    driver("gpus 1")
    watched = watch()
    watched.read()
    watched.reader._process.kill()
    assert watched.read() == GpusRead(missing="the process that asked NVML ended with -9")


@pytest.mark.parametrize(
    "values",
    ['{"gpus": [{}]}', '{"gpus": [{"index": "x"}]}', '{"gpus": 3}', '{"gpus": [{"index": 0, "name": "\\u001b"}]}', "x"],
)
def test_a_line_that_makes_no_sense_is_a_reason(
    values: str, driver: Says, watch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "child.py").write_text(f'input()\nprint(\'{{"record": "GpusRead", \' + {values!r}[1:])')
    monkeypatch.setattr(reader, "_CHILD", str(tmp_path / "child.py"))
    assert watch().read() == GpusRead(missing="the answer of the GPU driver could not be read")


# One question, as for a hang.


@pytest.fixture
def installed(driver: Says, monkeypatch: pytest.MonkeyPatch) -> Says:
    monkeypatch.setattr(devices, "has_nvml", lambda: True)
    return driver


def test_why_a_gpu_is_throttled() -> None:
    """A question is the driver's reasons. Idle, and the power limit: no fault of the GPU."""
    assert GpuReading(index=0, clock_reasons=None).throttled == ""
    golden.check_answers("throttled_gpus", lambda text: GpuReading(index=0, clock_reasons=int(text, 16)).throttled)


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
    assert read_once("activity", 60).missing == "NVML: NVML Shared Library Not Found"


def test_a_child_that_cannot_be_started_is_a_reason(installed: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/missing")
    missing = "no process could be started to ask the GPU driver: No such file or directory"
    assert read_once("activity", 60) == GpusRead(missing=missing)


def test_only_a_library_that_loads_counts_as_installed(nvml_library: Path, tmp_path: Path) -> None:
    (tmp_path / devices.NVML_LIBRARY).write_text("not a library")
    text = "import sys; from ddplaunch.system import devices; print(devices.has_nvml(), 'pynvml' in sys.modules)"
    for folder, has_nvml in ((nvml_library, "True"), (tmp_path, "False")):
        command = ["env", f"LD_LIBRARY_PATH={folder}", sys.executable, "-c", text]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{has_nvml} False\n"
