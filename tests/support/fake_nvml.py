"""The fake libnvidia-ml.so.1 of ``fake_nvml.c``: built once per version, loaded by the real binding."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

Says = Callable[..., None]
"""Sets what the driver of the fixture ``driver`` answers from now on, as lines of its file."""

SOURCE = Path(__file__).with_name("fake_nvml.c")


def build(folder: Path, *flags: str) -> Path:
    """``folder`` with the library in it, for LD_LIBRARY_PATH; ``-DOLD`` for that of an old driver."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", *flags, "-o", library, SOURCE], check=True)
    return folder


def gpu(index: int, utilization: int, memory: int, power_mw: int, limit_mw: int = 700_000) -> list[str]:
    """Lines of the file that FAKE_NVML names, for one GPU."""
    values = {"utilization": utilization, "memory": memory, "power": power_mw, "limit": limit_mw}
    return [f"{index} {key} {value}" for key, value in values.items()]


def healthy(index: int) -> list[str]:
    """All values of a GPU without a fault, with NVSwitches."""
    values = {
        "limit": 700_000,
        "clocks": 1,
        "total": 85_899_345_920,
        "used": 4_194_304,
        "vbios": "96.00.74.00.1A",
        "mig": "0 0",
        "display": 0,
        "rows": "0 0 0 0",
        "ecc": "1 1",
        "ecc_default": 1,
        "uncorrected": 0,
        "sram_corrected": 0,
        "dram_corrected": 0,
        "sram_worn": 0,
        "nvlinks": "1" * 18,
        "field230": 0,
        "pcie": 16,
        "pcie_max": 16,
        "fabric": f"3 0 {0xAAA}",
        "margin": 45,
    }
    return [f"{index} {key} {value}" for key, value in values.items()]


def say(path: Path, *lines: str) -> None:
    """Replaces the file: the library never reads half of it."""
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    new.replace(path)
