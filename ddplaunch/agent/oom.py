"""Evidence that the kernel killed a worker for memory: counters of such kills, compared over an attempt.

Runs in the agent. A worker that dies by SIGKILL says nothing, and the kernel's log, which would, needs root.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.model import Certainty


@dataclass(frozen=True)
class OomCounters:
    """Processes killed for memory so far; only the difference of two readings means anything.

    Attributes:
        machine: on the whole machine, for a limit of any cgroup too (``oom_kill`` in /proc/vmstat, Linux 4.13), so it
            also counts what happens in other people's containers.
        cgroup: in the agent's own cgroup, and with cgroup v2 in those below.
    """

    machine: int = 0
    cgroup: int = 0

    @classmethod
    def read(cls, root: str = "/") -> OomCounters:
        """The counters now; what is missing or unreadable counts as 0.

        To be read after a worker's death was seen: the kernel counts a kill before it sends the signal
        (``__oom_kill_process`` in mm/oom_kill.c), so a kill that was seen is counted.
        """
        base = Path(root)
        return cls(machine=_oom_kill(_text(base / "proc/vmstat")), cgroup=_cgroup_kills(base))


def blames(before: OomCounters, after: OomCounters) -> Certainty:
    """Whether a SIGKILL between the two readings was the kernel's, for memory.

    A kill in our cgroup was one of ours; one somewhere on the machine need not have been.
    """
    if after.cgroup > before.cgroup:
        return "yes"
    return "perhaps" if after.machine > before.machine else "no"


def _cgroup_kills(base: Path) -> int:
    own = _own_cgroups(_text(base / "proc/self/cgroup"))
    v1 = _own_file(base / "sys/fs/cgroup/memory", own.get("memory"), "memory.oom_control")
    v2 = _own_file(base / "sys/fs/cgroup", own.get(""), "memory.events")
    return _oom_kill(v1) + _oom_kill(v2)  # the memory controller is in one of the two hierarchies


def _own_cgroups(text: str) -> dict[str, str]:
    """Controller -> path, from lines such as ``4:cpu,memory:/job``; v2's line ``0::/job`` is the controller ``""``."""
    lines = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}


def _own_file(mount: Path, path: str | None, name: str) -> str:
    # Where a container shares the host's cgroup namespace the path is the host's, and the container's own cgroup is
    # what is mounted.
    candidates = [] if path is None else [mount / path.lstrip("/") / name, mount / name]
    return next(filter(None, map(_text, candidates)), "")


def _oom_kill(text: str) -> int:
    found = re.search(r"^oom_kill ([0-9]+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
