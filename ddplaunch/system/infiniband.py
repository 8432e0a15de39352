"""The ports of this machine's InfiniBand and RoCE adapters, from the kernel's files.

Runs in the child of ``gpu_health``: the driver asks the adapter, which may not answer.
"""

from __future__ import annotations

import re
from pathlib import Path

from ddplaunch.late_dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class IbPort:
    """One port; see Documentation/ABI/stable/sysfs-class-infiniband of the Linux kernel.

    Attributes:
        name: adapter and port, as ``mlx5_0:1``.
        board: the kind of the adapter, as ``MT_0000000838``.
        link_layer: ``InfiniBand`` or ``Ethernet``.
        state: ``ACTIVE``, ``DOWN``, ``INIT`` or ``ARMED``.
        phys_state: ``LinkUp``, ``Polling``, ``Disabled`` and others.
        rate_gbps: 10^9 bits per second; 0 if it is not known.
        link_downed: how often its link has gone down since the driver was loaded.
    """

    name: str
    board: str = ""
    link_layer: str = ""
    state: str = ""
    phys_state: str = ""
    rate_gbps: int = 0
    link_downed: int = 0


def ports(root: str = "/") -> list[IbPort]:
    """All ports, by name."""
    return [_port(folder) for folder in sorted(Path(root, "sys/class/infiniband").glob("*/ports/*"))]


def _port(folder: Path) -> IbPort:
    device = folder.parent.parent
    return IbPort(
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
