"""The ports of this machine's InfiniBand and RoCE adapters, from the kernel's files.

Runs in ``gpu_child``: the driver asks the adapter, which may not answer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def ports(root: str = "/") -> list[dict[str, Any]]:
    """The values of ``protocol.gpus.IbPort`` of all ports, by name."""
    return [_port(folder) for folder in sorted(Path(root, "sys/class/infiniband").glob("*/ports/*"))]


def _port(folder: Path) -> dict[str, Any]:
    device = folder.parent.parent
    return dict(
        name=f"{device.name}:{folder.name}",
        board=_text(device / "board_id"),
        link_layer=_text(folder / "link_layer"),
        state=_text(folder / "state").rpartition(": ")[2],
        phys_state=_text(folder / "phys_state").rpartition(": ")[2],
        rate_gbps=_number(folder / "rate"),
        link_downed=_number(folder / "counters/link_downed"),
    )


def _number(file: Path) -> int:
    """The whole number at the begin of a file, as that of ``200 Gb/sec (4X HDR)``."""
    found = re.match(r"[0-9]{1,18}", _text(file), re.ASCII)
    return int(found[0]) if found else 0


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
