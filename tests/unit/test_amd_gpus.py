"""The health of AMD's GPUs, from a tree of files like that of their driver."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.features.health import gpu_rules
from ddplaunch.protocol.gpus import GpuReading, IbPort
from ddplaunch.system.gpus import amd_gpus, devices
from tests.support.gpus import readers

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


def test_all_values_of_a_gpu_are_read(device: Path, start: Any) -> None:
    watched = start()
    (gpu,) = watched.read().gpus
    assert gpu == GpuReading(
        index=0,
        uuid="GPU-3b7d5f0a1c2e4d6f",
        name="AMD Instinct MI300X OAM",
        pci_address="0000:23:00.0",
        driver="6.12.12",
        vbios="113-M3000100-102",
        has_display=False,
        memory_bytes=206_141_652_992,
        used_bytes=297_795_584,
        power_limit_w=750.0,
        uncorrected_errors=0,
        dram_corrected=3,
        pcie_width=16,
        pcie_max_width=16,
        throttled_minutes=0,
        nvlink_error_minutes=0,
        temperature_margin_c=52,
    )
    assert gpu_rules.at_start(gpu) == ()
    memory = GpuReading(index=0, used_bytes=297_795_584, memory_bytes=206_141_652_992)
    assert watched.read("memory").gpus == (memory,)


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
    (finding,) = gpu_rules.while_running(before, watched.read().gpus[0])
    assert (finding.rule, finding.is_fault) == ("uncorrected-errors", True)


@pytest.mark.parametrize(
    ("file", "text", "rules"),
    [
        ("current_link_width", "2", ["pcie-narrow"]),
        ("current_link_width", "8", ["pcie-width"]),
        ("hwmon/hwmon3/temp2_input", "96000", ["temperature"]),
        ("hwmon/hwmon3/temp2_input", "95000", []),
        ("mem_info_vram_used", str(513 << 20), ["in-use"]),
        ("mem_info_vram_used", "Unknown", []),
        ("ras/umc_err_count", "ue: 0\nce: 20000001", ["many-corrected-dram"]),
    ],
)
def test_the_rules_are_those_of_all_gpus(file: str, text: str, rules: list[str], device: Path, start: Any) -> None:
    _write(device / file, text)
    assert [finding.rule for finding in gpu_rules.at_start(start().read().gpus[0])] == rules


def test_what_a_gpu_has_no_file_for_is_unknown(device: Path, start: Any) -> None:
    for name in FILES:
        (device / name).unlink()
    assert start().read().gpus == (
        GpuReading(
            index=0,
            name="AMD GPU",
            has_display=False,
            pci_address="0000:23:00.0",
            throttled_minutes=0,
            nvlink_error_minutes=0,
        ),
    )


def test_a_gpu_that_the_driver_has_lost_is_an_error(
    device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: Path, **_: Any) -> str:
        raise OSError(19, "No such device")

    monkeypatch.setattr(amd_gpus.devices, "gpu_pci_addresses", lambda root: ("0000:23:00.0",))
    monkeypatch.setattr(Path, "read_text", gone)
    assert amd_gpus.read(str(tmp_path), "health")[0]["error"].endswith("No such device")


@pytest.mark.parametrize("power", ["power1_average", "power1_input"])
def test_usage_is_read_from_the_drivers_files(device: Path, start: Any, power: str) -> None:
    """Newer drivers name the file of the power otherwise."""
    for name, text in {"gpu_busy_percent": "88", f"hwmon/hwmon3/{power}": "512000000"}.items():
        _write(device / name, text)
    _write(device / "hwmon/hwmon3/temp1_input", "61000")
    watched = start()
    watched.read()
    (found,) = watched.read("usage").gpus
    assert found == GpuReading(index=0, utilization=88, used_bytes=297_795_584, power_w=512.0, temperature_c=61)
