"""A cgroup v2 for the node's workers: one write kills every process in it, even one that forks fast or hides.

Runs in the agent. Works only where the kernel lets the agent create a cgroup below its own; elsewhere the sweep of
``processes`` works alone. Must not change controllers: limits and the counters of out-of-memory kills stay as they are.
Nothing here raises.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from pathlib import Path


def create(tag: str, root: str = "/") -> tuple[Path | None, str]:
    """Create an empty cgroup for the workers of the node with this tag; or None, and the reason.

    A worker enters by writing "0" to its ``cgroup.procs`` before it runs anything, so its children are in it too.
    """
    base = Path(root)
    try:
        _, own = _find_own(base)
        for old in own.glob(_prefix("*", base) + "*"):
            if not os.path.exists(base / "proc" / old.name.rpartition("-")[2]):
                remove(old, deadline=0)  # The agent and the launcher of this cgroup were killed.
        # An existing cgroup of this name belonged to a dead agent with this pid.
        cgroup = own / f"{_prefix(tag, base)}{os.getpid()}"
        cgroup.mkdir(exist_ok=True)
        if os.access(cgroup / "cgroup.kill", os.W_OK):
            return cgroup, ""
        cgroup.rmdir()
        return None, "the kernel has no cgroup.kill, which came with Linux 5.14"
    except OSError as error:
        return None, str(error)


def kill(cgroup: Path) -> None:
    """SIGKILL every process in it and below it, including those being forked (cgroup.kill, cgroups(7)).

    Returns before they are gone.
    """
    with contextlib.suppress(OSError):
        (cgroup / "cgroup.kill").write_text("1")


def remove(cgroup: Path, deadline: float) -> bool:
    """Wait, at most until ``deadline``, until the cgroup is empty, and remove it; False if it still exists."""
    with contextlib.suppress(OSError):
        if _is_emptied(cgroup, deadline):
            for folder, _, _ in os.walk(cgroup, topdown=False):
                os.rmdir(folder)
    return not os.path.exists(cgroup)


def kill_tagged(tag: str, deadline: float, root: str = "/", excluded: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Kill and remove the remaining cgroups of lost agents of the node with this tag, under any login.

    A cgroup that contains a process of ``excluded`` stays. Returns the pids that still exist at ``deadline``.
    """
    found = [
        cgroup for cgroup, cgroup_tag in of_runs(root) if cgroup_tag == tag and excluded.isdisjoint(members(cgroup))
    ]
    for cgroup in found:
        kill(cgroup)
    return tuple(pid for cgroup in found if not remove(cgroup, deadline) for pid in members(cgroup))


def of_runs(root: str = "/") -> list[tuple[Path, str]]:
    """The cgroups that agents created on this machine, under any login, each with its node's tag."""
    base = Path(root)
    with contextlib.suppress(OSError):
        mount, _ = _find_own(base)
        ours = re.compile(_prefix("(.+)", base) + "[0-9]+")
        folders = (Path(folder, name) for folder, names, _ in os.walk(mount) for name in names)
        return [(folder, match[1]) for folder in folders if (match := ours.fullmatch(folder.name))]
    return []


def members(cgroup: Path) -> list[int]:
    """Pids of the processes in it and below it."""
    return [pid for folder, _, _ in os.walk(cgroup) for pid in _pids(Path(folder))]


def _prefix(tag: str, base: Path) -> str:
    """Contains the pid namespace: agents of one run in two containers may have equal pids and one cgroup."""
    return f"ddplaunch-{tag}-{(base / 'proc/self/ns/pid').stat().st_ino}-"


def _find_own(base: Path) -> tuple[Path, Path]:
    """The mount point of cgroup v2, and this process's cgroup in it.

    Raises:
        OSError: there is none, or this process may not create cgroups in it.
    """
    lines = (base / "proc/self/cgroup").read_text(errors="surrogateescape").split("\n")
    path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    mounts = (base / "proc/self/mountinfo").read_text(errors="surrogateescape").split("\n")
    for fields in (line.split(" ") for line in mounts if " - cgroup2 " in line):
        mounted, where = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field) for field in fields[3:5])
        mount = base / where.lstrip("/")
        own = mount / os.path.relpath(path, mounted)
        # Namespaces and bind mounts can make the paths differ; cgroup.procs of a threaded cgroup cannot be read.
        if os.getpid() in _pids(own) and os.access(own / "cgroup.procs", os.W_OK):
            return mount, own
    raise OSError("no cgroup v2 is mounted that contains this process and lets it create cgroups")


def _is_emptied(cgroup: Path, deadline: float) -> bool:
    with open(cgroup / "cgroup.events", "rb", buffering=0) as events:
        poll = select.poll()
        poll.register(events, select.POLLPRI)  # Set when the file has changed since it was last read (cgroups(7)).
        while b"populated 1" in events.read():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            poll.poll(remaining_s * 1000)
            events.seek(0)
    return True


def _pids(cgroup: Path) -> list[int]:
    try:
        return [int(word) for word in (cgroup / "cgroup.procs").read_text().split()]
    except OSError:
        return []
