"""The real binding asks a fake library of the driver (tests/support/fake_nvml.c), in the real child process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddplaunch.system.gpus import nvml
from ddplaunch.system.gpus.nvml import GpuActivity, gpu_activity
from tests.support import fake_nvml
from tests.support.fake_nvml import Says, gpu


def test_each_gpu_is_read(driver: Says) -> None:
    driver("gpus 2", "0 name NVIDIA H100 80GB HBM3", *gpu(0, 100, 0, 120_500), *gpu(1, 37, 21, 655_000))
    first, second = gpu_activity()[0]
    assert first == GpuActivity(
        index=0,
        name="NVIDIA H100 80GB HBM3",
        uuid="GPU-0000-0",
        pci_address="00000000:10:00.0",
        utilization=100,
        memory_utilization=0,
        power_w=120.5,
        power_limit_w=700.0,
    )
    assert (second.index, second.utilization, second.memory_utilization, second.power_w) == (1, 37, 21, 655.0)


@pytest.mark.parametrize(
    ("clocks", "text"),
    [
        (0, ""),
        (0x5, ""),  # Idle, and the power limit: no fault of the GPU.
        (0x48, "thermal slowdown (hardware), hardware slowdown"),
        (0x20, "thermal slowdown (driver)"),
        (0x84, "power brake"),
    ],
)
def test_why_a_gpu_is_throttled(clocks: int, text: str, driver: Says) -> None:
    driver("gpus 1", *gpu(0, 100, 0, 120_500), f"0 clocks {clocks}")
    assert gpu_activity()[0][0].throttled == text


def test_what_a_gpu_does_not_support_is_unknown(driver: Says) -> None:
    driver("gpus 1", *gpu(0, 100, 0, 120_500), "error nvmlDeviceGetUtilizationRates 3")
    (found,) = gpu_activity()[0]
    assert (found.utilization, found.memory_utilization, found.power_w, found.error) == (None, None, 120.5, "")


def test_what_an_old_driver_lacks_is_unknown(driver: Says, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml.build(tmp_path / "old", "-DOLD")))
    driver("gpus 1", *gpu(0, 100, 0, 120_500))
    (found,) = gpu_activity()[0]
    assert (found.power_limit_w, found.pci_address, found.utilization, found.error) == (None, "", 100, "")


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetPowerUsage"])
def test_a_lost_gpu_is_named(function: str, driver: Says) -> None:
    driver("gpus 1", f"error {function} 15")
    (found,) = gpu_activity()[0]
    assert (found.index, found.error) == (0, "GPU is lost")


def test_a_number_that_makes_no_sense_is_within_its_limits(driver: Says) -> None:
    driver("gpus 1", *gpu(0, 4_000_000_000, 101, 0))
    (found,) = gpu_activity()[0]
    assert (found.utilization, found.memory_utilization) == (100, 100)


def test_a_name_cannot_steer_the_terminal(driver: Says) -> None:
    driver("gpus 1", "0 name \x1b[31mred")
    assert gpu_activity()[0][0].name == r"\x1b[31mred"


def test_a_driver_that_is_not_loaded_is_a_reason(driver: Says) -> None:
    driver("error nvmlInitWithFlags 9")
    assert gpu_activity() == ((), "NVML: Driver Not Loaded")


def test_no_gpus_are_a_reason(driver: Says) -> None:
    driver("gpus 0")
    assert gpu_activity() == ((), "NVML knows no GPU")


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetUtilizationRates"])
def test_a_driver_that_hangs_is_a_finding_in_time(function: str, driver: Says) -> None:
    driver("gpus 1", f"block {function}")
    started = time.monotonic()
    assert gpu_activity(0.7) == ((), "NVML has not answered for 0.7 s: the GPU driver hangs, or is very slow")
    assert time.monotonic() - started < 5


def test_without_the_library_there_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / nvml.LIBRARY).write_text("not a library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert gpu_activity() == ((), "NVML: NVML Shared Library Not Found")


def test_only_a_library_that_loads_counts_as_installed(nvml_library: Path, tmp_path: Path) -> None:
    (tmp_path / nvml.LIBRARY).write_text("not a library")
    for folder, is_installed in ((nvml_library, "True"), (tmp_path, "False")):
        text = "import sys; from ddplaunch.system.gpus import nvml; print(nvml.is_installed(), 'pynvml' in sys.modules)"
        command = ["env", f"LD_LIBRARY_PATH={folder}", sys.executable, "-c", text]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{is_installed} False\n"


@pytest.mark.parametrize("text", ["", "x", "[]", "{}", '{"gpus": [{}]}', '{"gpus": [3]}', '{"gpus": [{"index": "x"}]}'])
def test_an_answer_that_is_none_is_a_reason(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_run_child", lambda *_: (text.encode(), 1))
    gpus, missing = gpu_activity()
    assert gpus == ()
    assert missing
