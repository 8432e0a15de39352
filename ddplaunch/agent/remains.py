"""Finds what runs of this user have on this machine: by the mark in the environment, by cgroup, by launcher's badge.

Only processes of the user who asks, in the container in which is asked.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddplaunch import environ, run_marks
from ddplaunch import marked as proc
from ddplaunch.agent import cgroup
from ddplaunch.remains import KINDS, Kind, RunHere, RunsFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_HELPERS: tuple[Kind, ...] = ("forkserver", "store", "member")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of the kernel's include/linux/sched.h, a flag in /proc/PID/stat."""

_LOCAL_AGENT, _REMOTE_AGENT = b"ddplaunch.agent.main", b"DDPLAUNCH_START"
"""What the command line of an agent holds, started here or over SSH."""


@dataclass(frozen=True)
class Process:
    """One process of a run; of a launcher's several, one for each.

    Attributes:
        mark: the node's; a launcher's is the run's.
        started: in the clock's ticks since boot: with the pid it is no other process's.
        is_led: whether a launcher is above this agent; false for all others.
    """

    pid: int
    mark: str
    kind: Kind
    started: int
    is_led: bool = False

    @property
    def run(self) -> str:
        """The run's mark."""
        return run_marks.run_of(self.mark)


@dataclass(frozen=True)
class _Seen:
    """What /proc tells of a process of ours."""

    pid: int
    parent: int
    session: int
    started: int
    mark: str
    badges: frozenset[str]
    command: tuple[bytes, ...]

    @property
    def is_agent(self) -> bool:
        inline = self.command[2] if self.command[1:2] == (b"-c",) and len(self.command) > 2 else b""
        return _LOCAL_AGENT in inline or _REMOTE_AGENT in inline


def find() -> tuple[tuple[Process, ...], tuple[int, ...]]:
    """All processes of runs, and pids of those that may not be looked at."""
    in_cgroup = {pid: mark for folder, mark in cgroup.of_runs() for pid in cgroup.members(folder)}
    seen: dict[int, _Seen] = {}
    hidden = []
    for pid in proc.pids():
        try:
            found = _look(pid, in_cgroup.get(pid, ""))
        except PermissionError:
            hidden.append(pid)
        else:
            if found:
                seen[pid] = found
    launchers = {pid for pid, process in seen.items() if process.badges}
    agents = {pid for pid, process in seen.items() if process.mark and process.is_agent}
    return tuple(_processes(seen.values(), launchers, agents)), tuple(hidden)


def _processes(seen: Iterable[_Seen], launchers: set[int], agents: set[int]) -> Iterator[Process]:
    for process in seen:
        for mark in process.badges:
            yield Process(process.pid, mark, "launcher", process.started)
        if process.mark:
            kind = _kind(process, agents)
            yield Process(
                process.pid, process.mark, kind, process.started, kind == "agent" and _is_led(process, launchers)
            )


def _kind(process: _Seen, agents: set[int]) -> Kind:
    if process.pid in agents:
        return "agent"
    for kind in _HELPERS:
        if process.command[:2] == (b"ddplaunch", kind.encode()):
            return kind
    # What a worker leaves becomes the agent's child too, but seldom leads a session.
    return "worker" if process.parent in agents and process.session == process.pid else "other"


def _is_led(agent: _Seen, launchers: set[int]) -> bool:
    """Over SSH the agent's parent is sshd's process for the connection: it goes when the launcher does."""
    return agent.parent in launchers or (agent.parent != 1 and any(_REMOTE_AGENT in word for word in agent.command))


def _look(pid: int, mark: str) -> _Seen | None:
    """What the process is; None if it is gone, or none of this user's or of this container's.

    ``mark`` is what its cgroup says.

    Raises:
        PermissionError: it is ours, and may not be looked at.
    """
    fields = proc.read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    if not fields or fields[0] in (b"Z", b"X") or int(fields[6]) & _KERNEL_THREAD or not _is_ours(pid):
        return None
    try:
        if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            return None
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            variables = file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    begin = f"{environ.RUN_ID}=".encode()
    texts = (os.fsdecode(line.removeprefix(begin)) for line in variables if line.startswith(begin))
    return _Seen(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        started=int(fields[19]),
        mark=next(filter(run_marks.is_mark, texts), mark),
        badges=run_marks.badges(pid),
        command=tuple(proc.read(f"/proc/{pid}/cmdline").split(b"\0")[:-1]),
    )


def _is_ours(pid: int) -> bool:
    """By the real user: a setuid program that we run is ours, and may not be looked at."""
    for line in proc.read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1]) == os.getuid()
    return False


def tell() -> RunsFound:
    """All runs that this machine has something of, but the asking process."""
    processes, hidden = find()
    runs: dict[str, list[Process]] = {}
    for process in processes:
        if process.pid != os.getpid():
            runs.setdefault(process.run, []).append(process)
    return RunsFound(_machine(), tuple(_told(mark, found) for mark, found in sorted(runs.items())), hidden)


def _told(mark: str, processes: list[Process]) -> RunHere:
    counts = Counter(process.kind for process in processes)
    oldest = min(process.started for process in processes)
    return RunHere(
        mark=mark,
        counts=tuple((kind, counts[kind]) for kind in KINDS if counts[kind]),
        age_s=max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - oldest / _TICKS_PER_S),
        memory_bytes=sum(_memory_bytes(process.pid) for process in processes),
        is_led=any(process.kind == "launcher" or process.is_led for process in processes),
    )


def _memory_bytes(pid: int) -> int:
    """Its share of the pages it has; 0 if that cannot be known."""
    for line in proc.read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _machine() -> str:
    return f"{os.fsdecode(proc.read('/proc/sys/kernel/random/boot_id').strip())} {os.readlink('/proc/self/ns/pid')}"
