"""The health of AMD's GPUs, from a tree of files like that of their driver."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.features.gpus import amd
from ddplaunch.features.gpus.records import IbPort
from ddplaunch.features.health.rules import at_start, while_running
from ddplaunch.system import devices
from tests.support import golden
from tests.support.gpus import changed, readers

FILES = {
    "mem_info_vram_total": "206141652992",
    "mem_info_vram_used": "297795584",
    "unique_id": "3b7d5f0a1c2e4d6f",
    "product_name": "AMD Instinct MI300X OAM",
    "vbios_version": "113-M3000100-102",
    "current_link_width": "16",
    "max_link_width": "16",
    "driver/module/version": "6.12.12",
    "hwmon/hwmon3/power1_cap": "750000000",
    "hwmon/hwmon3/temp2_input": "48000",
    "hwmon/hwmon3/temp2_crit": "100000",
    "ras/umc_err_count": "ue: 0\nce: 3",
    "ras/gfx_err_count": "ue: 0\nce: 7",
}


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """The files of the only GPU below ``tmp_path``."""
    node = tmp_path / "sys/class/kfd/kfd/topology/nodes/0"
    node.mkdir(parents=True)
    (node / "properties").write_text("simd_count 304\nlocation_id 8960\ndomain 0\n")
    folder = tmp_path / "sys/bus/pci/devices/0000:23:00.0"
    for name, text in FILES.items():
        _write(folder / name, text)
    return folder


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(devices, "has_nvml", lambda: False)
    with readers() as start:
        yield functools.partial(start, 0.02, str(tmp_path))


def test_the_files_of_a_gpu_are_read_and_judged_by_the_rules_of_all(device: Path, start: Any) -> None:
    """A question is what is asked, and files with another text, or ``no file``."""

    def told(question: str) -> str:
        asked, *changes = question.split(" / ")
        files = {} if "no file" in changes else {**FILES, **dict(each.split(" = ") for each in changes)}
        shutil.rmtree(device)
        device.mkdir()
        for name, text in files.items():
            _write(device / name, text)
        watched = start()
        (first,) = watched.read().gpus
        (gpu,) = (first,) if asked == "health" else watched.read(asked).gpus
        watched.reader.close()
        return ", ".join([changed(gpu), *(finding.rule for finding in at_start(first))])

    golden.check_answers("amd_gpus", told)


def test_the_ports_of_the_node_come_with_the_reading(device: Path, tmp_path: Path, start: Any) -> None:
    _write(tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    watched = start()
    assert watched.read().ports == (IbPort(name="mlx5_0:1", state="ACTIVE"),)
    _write(tmp_path / "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    assert watched.read().ports == (IbPort(name="mlx5_0:1", state="DOWN"),)


def test_an_error_during_the_run_is_read(device: Path, start: Any) -> None:
    watched = start()
    before = watched.read().gpus[0]
    _write(device / "ras/gfx_err_count", "ue: 2\nce: 7")
    (finding,) = while_running(before, watched.read().gpus[0])
    assert (finding.rule, finding.is_fault) == ("uncorrected-errors", True)


def test_a_gpu_that_the_driver_has_lost_is_an_error(
    device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: Path, **_: Any) -> str:
        raise OSError(19, "No such device")

    monkeypatch.setattr(amd.devices, "gpu_pci_addresses", lambda root: ("0000:23:00.0",))
    monkeypatch.setattr(Path, "read_text", gone)
    assert amd.read(str(tmp_path), "health")[0]["error"].endswith("No such device")
