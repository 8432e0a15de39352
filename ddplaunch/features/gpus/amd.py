"""The health of AMD's GPUs, from the files of their driver (amdgpu) in /sys.

Runs in ``child``: a GPU that is being reset may block whoever reads them. What a GPU has no file for
is left out.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

from ddplaunch.system import devices

_LOST = (errno.ENODEV, errno.ENXIO, errno.EIO)


def read(root: str, question: str) -> list[dict[str, Any]]:
    """For each GPU the values of ``records.GpuReading`` that the question is about; None: unknown."""
    found = []
    for index, address in enumerate(devices.gpu_pci_addresses(root)):
        gpu: dict[str, Any] = {"index": index}
        _READERS[question](Path(root, "sys/bus/pci/devices", address), gpu)
        found.append(gpu)
    return found


def _memory(device: Path, gpu: dict[str, Any]) -> None:
    gpu["memory_bytes"] = _number(device / "mem_info_vram_total", gpu)
    gpu["used_bytes"] = _number(device / "mem_info_vram_used", gpu)


def _usage(device: Path, gpu: dict[str, Any]) -> None:
    power, hot = _watts(device, "power1_average", gpu), _sensor(device, "temp1_input", gpu)
    gpu.update(
        utilization=_number(device / "gpu_busy_percent", gpu),
        used_bytes=_number(device / "mem_info_vram_used", gpu),
        power_w=_watts(device, "power1_input", gpu) if power is None else power,
        temperature_c=None if hot is None else hot // 1000,
    )


def _health(device: Path, gpu: dict[str, Any]) -> None:
    _memory(device, gpu)
    uncorrected, corrected = _memory_errors(device / "ras", gpu)
    serial = _text(device / "unique_id", gpu)
    gpu.update(
        uuid=f"GPU-{serial}" if serial else None,
        name=_text(device / "product_name", gpu) or "AMD GPU",
        has_display=any(_text(file, gpu) == "connected" for file in device.glob("drm/card*/card*-*/status")),
        pci_address=device.name,
        driver=_text(device / "driver/module/version", gpu),
        vbios=_text(device / "vbios_version", gpu),
        power_limit_w=_watts(device, "power1_cap", gpu),
        pcie_width=_number(device / "current_link_width", gpu),
        pcie_max_width=_number(device / "max_link_width", gpu),
        temperature_margin_c=_margin(device, gpu),
        uncorrected_errors=uncorrected,
        dram_corrected=corrected,
    )


def _memory_errors(folder: Path, gpu: dict[str, Any]) -> tuple[int | None, int | None]:
    """Uncorrected errors of all blocks, and corrected ones of the memory (umc), since the driver was loaded."""
    counts = {
        file.name.removesuffix("_err_count"): dict(re.findall(r"^(\w+): *(\d+)$", _text(file, gpu), re.MULTILINE))
        for file in folder.glob("*_err_count")
    }
    if "umc" not in counts:
        return None, None
    return sum(int(count.get("ue", 0)) for count in counts.values()), int(counts["umc"].get("ce", 0))


def _margin(device: Path, gpu: dict[str, Any]) -> int | None:
    """Degrees between the hottest spot (the second sensor) and the temperature at which the clocks are lowered."""
    hot, limit = _sensor(device, "temp2_input", gpu), _sensor(device, "temp2_crit", gpu)
    return None if hot is None or not limit else (limit - hot) // 1000


def _watts(device: Path, name: str, gpu: dict[str, Any]) -> float | None:
    microwatts = _sensor(device, name, gpu)
    return None if microwatts is None else microwatts / 1_000_000


def _sensor(device: Path, name: str, gpu: dict[str, Any]) -> int | None:
    return next((_number(folder / name, gpu) for folder in device.glob("hwmon/hwmon*")), None)


def _number(file: Path, gpu: dict[str, Any]) -> int | None:
    text = _text(file, gpu)
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text, re.ASCII) else None


def _text(file: Path, gpu: dict[str, Any]) -> str:
    """Empty if the file cannot be read; what the driver says of a GPU that is lost becomes its error."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError as error:
        if error.errno in _LOST:
            gpu["error"] = f"{file.name}: {error.strerror}"
        return ""


_READERS = {"health": _health, "memory": _memory, "usage": _usage}
