"""Counters of processes and of this machine, from files of /proc that stay open: a reading is one system call each.

Used by the agent, every 2 s while workers run, in its main thread: nothing here may block, or take long. A counter that
the kernel does not have, or that this user may not read, is None.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from ddplaunch.system import procfs

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_OWN_CPU, _ENDED_CPU, _RSS = slice(11, 13), slice(13, 15), 21
"""Positions in /proc/PID/stat: utime and stime; both of the children that were waited for; pages in memory."""

_READ_BYTES = 4096
_MAX_READS = 64
_MAX_CHILDREN = 64
"""Of one worker: each costs some 50 us in a reading."""


class KeptFile:
    """A file that stays open. The descriptor of a process's file stays bound to that process, whatever its pid does."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def read(self) -> bytes:
        """The first 4 kB; empty if the file cannot be read, as that of a process that has ended."""
        try:
            return os.pread(self._fd, _READ_BYTES, 0)
        except OSError:
            return b""

    def read_all(self) -> bytes:
        """As ``read``, for a file that may be longer."""
        parts = [self.read()]
        with contextlib.suppress(OSError):
            while parts[-1] and len(parts) < _MAX_READS:
                parts.append(os.pread(self._fd, _READ_BYTES, sum(map(len, parts))))
        return b"".join(parts)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class OwnCounters(NamedTuple):
    """Of one process: CPU seconds, those of the children that it has waited for, and bytes in memory."""

    cpu_s: float
    ended_cpu_s: float
    rss_bytes: int


class TreeCounters(NamedTuple):
    """Of a process with its children: CPU seconds of the children alone, bytes read and written by all; or None."""

    children_cpu_s: float
    read_bytes: int | None
    written_bytes: int | None


class ProcessFiles:
    """The files of one process."""

    def __init__(self, pid: int) -> None:
        self._stat = KeptFile(f"/proc/{pid}/stat")
        self._io = KeptFile(f"/proc/{pid}/io")
        self._children = KeptFile(f"/proc/{pid}/task/{pid}/children")

    def own(self) -> OwnCounters | None:
        """None once the process has ended."""
        return _own(self._stat.read())

    def tree(self, own: OwnCounters) -> TreeCounters:
        """With the children of its main thread: dearer than ``own``, which is the process's."""
        io = procfs.read_and_written(self._io.read())
        cpu_s = own.ended_cpu_s
        for child in self._children.read().split()[:_MAX_CHILDREN]:
            found = _own(procfs.read(f"/proc/{child.decode()}/stat"))
            cpu_s += found.cpu_s + found.ended_cpu_s if found else 0.0
            of_child = procfs.read_and_written(procfs.read(f"/proc/{child.decode()}/io"))
            io = (io[0] + of_child[0], io[1] + of_child[1]) if io and of_child else io
        return TreeCounters(cpu_s, *(io or (None, None)))

    def close(self) -> None:
        for file in (self._stat, self._io, self._children):
            file.close()


def _own(stat: bytes) -> OwnCounters | None:
    fields = stat.rpartition(b")")[2].split()
    if len(fields) <= _RSS or fields[procfs.STATE] in (b"Z", b"X"):
        return None
    own, ended = (sum(map(int, fields[which])) / _TICKS_PER_S for which in (_OWN_CPU, _ENDED_CPU))
    return OwnCounters(own, ended, int(fields[_RSS]) * _PAGE_BYTES)


class MachineCounters(NamedTuple):
    """Of this machine: seconds in which CPUs were idle, in all; bytes of memory in use; bytes over the network.

    Memory in use is what programs cannot get without another losing some.
    """

    idle_s: float | None
    memory_bytes: int | None
    received_bytes: int | None
    sent_bytes: int | None


class MachineFiles:
    """The files of this machine. The network is that of real adapters; in a container, of all but loopback."""

    def __init__(self) -> None:
        # Not /proc/stat, which takes the kernel a millisecond on a machine with hundreds of CPUs.
        self._uptime, self._meminfo = KeptFile("/proc/uptime"), KeptFile("/proc/meminfo")
        self._adapters, self._network = _adapters(), KeptFile("/proc/self/net/dev")

    def read(self) -> MachineCounters:
        uptime = self._uptime.read().split()
        memory = procfs.memory(self._meminfo.read())
        used = memory[0] - memory[1] if memory else None
        received, sent = network_bytes(self._network.read_all(), self._adapters)
        return MachineCounters(float(uptime[1]) if len(uptime) > 1 else None, used, received, sent)

    def close(self) -> None:
        for file in (self._uptime, self._meminfo, self._network):
            file.close()


def _adapters() -> frozenset[bytes]:
    """Names of the network adapters that are hardware."""
    folder = "/sys/class/net"
    with contextlib.suppress(OSError):
        return frozenset(os.fsencode(name) for name in os.listdir(folder) if os.path.exists(f"{folder}/{name}/device"))
    return frozenset()


def network_bytes(net_dev: bytes, adapters: frozenset[bytes]) -> tuple[int | None, int | None]:
    """Bytes received and sent by ``adapters``, or without any by all interfaces but loopback; None: there are none."""
    found = [line.partition(b":") for line in net_dev.splitlines() if b":" in line]
    counted = {name.strip(): rest.split() for name, _, rest in found if name.strip() != b"lo"}
    rows = [row for name, row in counted.items() if len(row) > 8 and (not adapters or name in adapters)]
    return (sum(int(row[0]) for row in rows), sum(int(row[8]) for row in rows)) if rows else (None, None)
