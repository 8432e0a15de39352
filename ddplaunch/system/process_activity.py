"""What a process and its descendants have done so far: CPU time, bytes read and written, waiting for a CPU (proc(5)).

Runs in the agent, for its workers, also when a machine is busy: a few reads of /proc for each process. A counter that
this user may not read counts as 0.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import field
from typing import TYPE_CHECKING

from ddplaunch.late_dataclass import dataclass
from ddplaunch.system import procfs, tcp_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddplaunch.system.tcp_bytes import Connection

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CPU_FIELDS = slice(11, 15)
"""utime, stime, and both of the children that were waited for."""

_READ_CALLS = {"x86_64": 0, "aarch64": 63}
"""Number of read(2) on each architecture."""

BLOCKED_STATES = {
    "T": "suspended by a signal",
    "t": "suspended by a debugger",
    "D": "in uninterruptible sleep, as in a file system or a device that does not answer",
}


@dataclass(frozen=True)
class ProcessActivity:
    """Totals since the start of a process, of which the kernel's counters have a resolution of 10 ms.

    Attributes:
        cpu_s: CPU time of each process of the tree that runs, by pid, ended children included.
        io_bytes: bytes that each has passed to read(2), write(2) and their kin, or that mapped files have read and
            written, by pid.
        tcp_bytes: bytes that each TCP connection of the tree has transferred, by inode.
        run_queue_wait_s: time for which the main thread of the first process was ready and had no CPU.
        unanswered: addresses of peers that do not acknowledge what the tree sends to them over TCP.
    """

    cpu_s: dict[int, float]
    io_bytes: dict[int, int]
    run_queue_wait_s: float
    tcp_bytes: dict[int, int] = field(default_factory=dict)
    unanswered: tuple[str, ...] = ()

    def cpu_since(self, earlier: ProcessActivity) -> float:
        """CPU seconds that the tree has used since ``earlier``; processes that began since then count in full."""
        return sum(max(0.0, value - earlier.cpu_s.get(pid, 0.0)) for pid, value in self.cpu_s.items())

    def io_since(self, earlier: ProcessActivity) -> int:
        """Bytes that the tree has read and written since ``earlier``, over TCP too; new connections count in full."""
        files, connections = (self.io_bytes, earlier.io_bytes), (self.tcp_bytes, earlier.tcp_bytes)
        return sum(max(0, new[key] - old.get(key, 0)) for new, old in (files, connections) for key in new)

    def busiest_child(self, earlier: ProcessActivity, parent: int) -> int | None:
        """The descendant of ``parent`` that used most CPU since ``earlier``; None if none used any."""
        used = {pid: value - earlier.cpu_s.get(pid, 0.0) for pid, value in self.cpu_s.items() if pid != parent}
        return max(used, key=used.__getitem__) if any(value > 0 for value in used.values()) else None


def read(pid: int, connections: dict[int, Connection] | None = None) -> ProcessActivity:
    """The activity of ``pid`` and its descendants. ``connections``: ``tcp_bytes.by_inode()``, if it is known."""
    tree = (pid, *descendants(pid))
    known = tcp_bytes.by_inode() if connections is None else connections
    own = {inode: found for each in tree for inode, found in tcp_bytes.of_process(each, known).items()}
    return ProcessActivity(
        cpu_s={each: _cpu_s(each) for each in tree},
        io_bytes={each: _io_bytes(each) for each in tree},
        run_queue_wait_s=_run_queue_wait_s(pid),
        tcp_bytes={inode: found.transferred for inode, found in own.items()},
        unanswered=tuple(sorted({found.unanswered for found in own.values() if found.unanswered})),
    )


def descendants(pid: int) -> Iterator[int]:
    """All descendants of ``pid`` that run; empty on a kernel without /proc/PID/task/TID/children."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        for child in map(int, procfs.read(f"/proc/{pid}/task/{thread}/children").split()):
            yield child
            yield from descendants(child)


def thread_cpu_s(pid: int, name: bytes) -> float:
    """CPU seconds of the first thread of the process that has this name; 0 if there is none."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            folder = f"/proc/{pid}/task/{thread}"
            if procfs.read(f"{folder}/comm").strip() == name:
                return int((procfs.read(f"{folder}/schedstat").split() or (0,))[0]) / 1e9
    return 0.0


def _cpu_s(pid: int) -> float:
    return sum(map(int, procfs.stat(pid)[_CPU_FIELDS])) / _TICKS_PER_S


def _io_bytes(pid: int) -> int:
    return sum(read_and_written(procfs.read(f"/proc/{pid}/io")) or ())


def read_and_written(io: bytes) -> tuple[int, int] | None:
    """Bytes read and written, as ``ProcessActivity.io_bytes`` counts them, of the text of /proc/PID/io."""
    counters = dict(line.split(b": ") for line in io.splitlines())
    if b"rchar" not in counters:
        return None
    pairs = ((b"rchar", b"read_bytes"), (b"wchar", b"write_bytes"))  # Of system calls, and of the storage.
    read, written = (max(int(counters.get(name, 0)) for name in pair) for pair in pairs)
    return read, written


def _run_queue_wait_s(pid: int) -> float:
    fields = procfs.read(f"/proc/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def waits_for_input(pid: int) -> bool:
    """Whether the main thread of ``pid`` is in read(2) of its standard input; false if the kernel does not say."""
    fields = procfs.read(f"/proc/{pid}/syscall").split()
    return fields[:2] == [str(_READ_CALLS.get(os.uname().machine, -1)).encode(), b"0x0"]


def suspended(pid: int) -> str:
    """What has suspended the process, as in ``suspended by a signal``; empty if nothing has, or if it is gone."""
    fields = procfs.stat(pid)
    return BLOCKED_STATES[fields[procfs.STATE].decode()] if fields and fields[procfs.STATE] in (b"T", b"t") else ""


def blocked_state(pid: int) -> str:
    """Why the kernel does not run the process; empty if it may run or is gone."""
    fields = procfs.stat(pid)
    return BLOCKED_STATES.get(fields[procfs.STATE].decode(), "") if fields else ""
