"""A cgroup v2 for the node's workers: one write ends all that is in it, however it hides and however fast it forks.

Runs in the agent, where the kernel lets it make a cgroup below its own; elsewhere the sweep of ``processes`` does the
work alone. Controllers stay as they are, so limits and the counters of ``oom`` mean the same. Nothing here raises.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from pathlib import Path


def create(mark: str, root: str = "/") -> tuple[Path | None, str]:
    """An empty cgroup for the workers of the run with this mark; or None, and why there is none.

    A worker enters by writing "0" to its ``cgroup.procs``, before it runs anything: what it starts is then in it too.
    """
    base = Path(root)
    try:
        _, own = _find_own(base)
        for old in own.glob(_prefix("*", base) + "*"):
            if not (base / "proc" / old.name.rpartition("-")[2]).exists():
                remove(old, deadline=0)  # Its agent was killed, and the launcher with it.
        # Only the leftover of an agent that died can have this name: it is ours to end.
        cgroup = own / f"{_prefix(mark, base)}{os.getpid()}"
        cgroup.mkdir(exist_ok=True)
        if os.access(cgroup / "cgroup.kill", os.W_OK):
            return cgroup, ""
        cgroup.rmdir()
        return None, "the kernel has no cgroup.kill, which came with Linux 5.14"
    except OSError as error:
        return None, str(error)


def kill(cgroup: Path) -> None:
    """SIGKILL all that is in it and below it, what is being forked included. They may take a moment to be gone."""
    with contextlib.suppress(OSError):
        (cgroup / "cgroup.kill").write_text("1")


def remove(cgroup: Path, deadline: float) -> bool:
    """Wait, at most until ``deadline``, for the cgroup to be empty and take it away; False if it is still there."""
    with contextlib.suppress(OSError):
        if _is_emptied(cgroup, deadline):
            for folder, _, _ in os.walk(cgroup, topdown=False):
                os.rmdir(folder)
    return not os.path.exists(cgroup)


def kill_run(mark: str, deadline: float, root: str = "/", spare: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Kill and remove what lost agents of the run with this mark have left on this machine, in any login's cgroup.

    One with a process of ``spare`` in it is left alone. Returns the pids still there at ``deadline``.
    """
    found = [cgroup for cgroup, its in of_runs(root) if its == mark and spare.isdisjoint(members(cgroup))]
    for cgroup in found:
        kill(cgroup)
    return tuple(pid for cgroup in found if not remove(cgroup, deadline) for pid in members(cgroup))


def of_runs(root: str = "/") -> list[tuple[Path, str]]:
    """The cgroups that agents of runs have made on this machine, in any login's cgroup, with the runs' marks."""
    base = Path(root)
    with contextlib.suppress(OSError):
        mount, _ = _find_own(base)
        ours = re.compile(_prefix("(.+)", base) + "[0-9]+")
        folders = (Path(folder, name) for folder, names, _ in os.walk(mount) for name in names)
        return [(folder, match[1]) for folder in folders if (match := ours.fullmatch(folder.name))]
    return []


def members(cgroup: Path) -> list[int]:
    """Pids of what is in it and below it."""
    return [pid for folder, _, _ in os.walk(cgroup) for pid in _pids(Path(folder))]


def _prefix(mark: str, base: Path) -> str:
    """Holds the pid namespace: agents of one run in two containers may have the same pid and the same cgroup."""
    return f"ddplaunch-{mark}-{(base / 'proc/self/ns/pid').stat().st_ino}-"


def _find_own(base: Path) -> tuple[Path, Path]:
    """Where cgroup v2 is mounted, and this process's cgroup there; OSError if it has none, or may not divide it."""
    lines = (base / "proc/self/cgroup").read_text(errors="surrogateescape").split("\n")
    path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    mounts = (base / "proc/self/mountinfo").read_text(errors="surrogateescape").split("\n")
    for fields in (line.split(" ") for line in mounts if " - cgroup2 " in line):
        shown, where = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field) for field in fields[3:5])
        mount = base / where.lstrip("/")
        own = mount / os.path.relpath(path, shown)
        # Namespaces and bind mounts can make the paths differ; and where only threads may be, nothing can be read.
        if os.getpid() in _pids(own) and os.access(own / "cgroup.procs", os.W_OK):
            return mount, own
    raise OSError("no cgroup v2 is mounted that this process is in and may divide")


def _is_emptied(cgroup: Path, deadline: float) -> bool:
    with open(cgroup / "cgroup.events", "rb", buffering=0) as events:
        poll = select.poll()
        poll.register(events, select.POLLPRI)  # The file has changed since it was last read (cgroups(7)).
        while b"populated 1" in events.read():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            poll.poll(left_s * 1000)
            events.seek(0)
    return True


def _pids(cgroup: Path) -> list[int]:
    try:
        return [int(word) for word in (cgroup / "cgroup.procs").read_text().split()]
    except OSError:
        return []
