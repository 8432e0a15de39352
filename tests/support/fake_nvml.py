"""The fake libnvidia-ml.so.1 of ``fake_nvml.c``: built once per version, loaded by the real binding."""

from __future__ import annotations

import subprocess
from pathlib import Path

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
