"""Whether memory is scarce: then a keeper ends. Reads the machine's memory and that of the cgroups of this process."""

from __future__ import annotations

import re
from pathlib import Path

from ddplaunch.system import procfs

_LEAST_PART = 0.05
"""Of the machine's memory, or of a cgroup's limit, that must be available."""

_STALLED_PERCENT = 10.0
"""Of the last 10 s, in which some process waited for memory (PSI)."""


def reason(root: str = "/") -> str:
    """Why a keeper must end; empty while there is enough memory, or where nothing can be read."""
    base = Path(root)
    return _of_machine(base) or _stalled(base) or _of_cgroups(base)


def _of_machine(base: Path) -> str:
    memory = procfs.memory(procfs.read(str(base / "proc/meminfo")))
    if memory is None:
        return ""
    total, available = memory
    return f"only {available >> 20} MiB of memory were available" if available < _LEAST_PART * total else ""


def _stalled(base: Path) -> str:
    match = re.search(r"^some avg10=([0-9.]+)", _read(base / "proc/pressure/memory"))
    return (
        f"processes waited for memory for {match[1]} % of 10 s" if match and float(match[1]) > _STALLED_PERCENT else ""
    )


def _of_cgroups(base: Path) -> str:
    """Of each cgroup from that of this process up, as far as it can be seen here."""
    for line in _read(base / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if ".." in path:  # Outside of this cgroup namespace.
            continue
        mount, files = base / "sys/fs/cgroup", _V2 if not controllers else _V1
        if "memory" in controllers.split(","):
            mount = mount / "memory"
        elif controllers:
            continue
        folder = mount / path.lstrip("/")
        while folder != mount.parent:
            if found := _of_cgroup(folder, *files):
                return found
            folder = folder.parent
    return ""


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")
"""The limit, what is used, and the part of that which is only a cache."""


def _of_cgroup(folder: Path, limit_file: str, used_file: str, cache: str) -> str:
    limit, used = _number(folder / limit_file), _number(folder / used_file)
    if not limit or used is None:
        return ""
    cached = re.search(rf"^{cache} ([0-9]+)$", _read(folder / "memory.stat"), re.MULTILINE)
    available = limit - used + (int(cached[1]) if cached else 0)
    if available >= _LEAST_PART * limit:
        return ""
    return f"only {available >> 20} MiB of the cgroup's {limit >> 20} MiB were available"


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    return procfs.read(str(path)).decode("utf-8", "replace")
