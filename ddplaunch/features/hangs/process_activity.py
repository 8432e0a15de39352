"""What a process and its descendants have done so far: CPU time, bytes read and written, waiting for a CPU (proc(5)).

Runs in the agent, for its workers, also when a machine is busy: a few reads of /proc for each process. A counter that
this user may not read counts as 0. /proc/PID/io does not count recv(2) and send(2), so that a download would not show
there: what TCP connections transfer is asked by sock_diag(7), which needs no privileges.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import field

from ddplaunch.late_dataclass import dataclass
from ddplaunch.system import procfs

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CPU_FIELDS = slice(11, 15)
"""utime, stime, and both of the children that were waited for."""

_READ_CALLS = {"x86_64": 0, "aarch64": 63}
"""Number of read(2) on each architecture."""

_NETLINK_SOCK_DIAG = 4
_BY_FAMILY, _DONE, _ERROR = 20, 3, 2
_REQUEST_DUMP = 0x301
_INFO = 2
"""The attribute with struct tcp_info."""

_CONNECTED_STATES = 0xFFF & ~(1 << 10)
"""All but those that listen."""

_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_MESSAGE_SIZE, _INODE_AT = 72, 68
_FAMILY_AT, _TIMER_AT, _RETRANSMITS_AT, _PEER_AT = 0, 2, 3, 24
_RETRANSMITS = 1
"""The timer runs because data has been sent and is not acknowledged."""

_MIN_RETRANSMITS = 3
"""Sent again so many times without an answer: for more than a second, and without end if a link is cut."""

_ATTRIBUTE = struct.Struct("=HH")
_BYTES_AT = 120
"""In tcp_info: bytes_acked, bytes_received."""

_LIMIT_S = 1.0


@dataclass(frozen=True)
class ProcessActivity:
    """Totals since the start of process ``pid``, of which the kernel's counters have a resolution of 10 ms.

    Attributes:
        at: ``time.monotonic()`` when they were read.
        cpu_s: CPU time of each process of the tree that runs, by pid, ended children included.
        io_bytes: bytes that each has passed to read(2), write(2) and their kin, or that mapped files have read and
            written, by pid.
        tcp_bytes: bytes that each TCP connection of the tree has transferred, by inode.
        run_queue_wait_s: time for which the main thread of the first process was ready and had no CPU; the kernel adds
            each wait at its end.
        is_ready: this thread computes, or is ready to.
        unanswered: addresses of peers that do not acknowledge what the tree sends to them over TCP.
    """

    pid: int
    at: float
    cpu_s: dict[int, float]
    io_bytes: dict[int, int]
    run_queue_wait_s: float
    is_ready: bool = False
    tcp_bytes: dict[int, int] = field(default_factory=dict)
    unanswered: tuple[str, ...] = ()

    def cpu_since(self, earlier: ProcessActivity) -> float:
        """CPU seconds that the tree has used since ``earlier``; processes that began since then count in full."""
        return sum(max(0.0, value - earlier.cpu_s.get(pid, 0.0)) for pid, value in self.cpu_s.items())

    def io_since(self, earlier: ProcessActivity) -> int:
        """Bytes that the tree has read and written since ``earlier``, over TCP too; new connections count in full."""
        files, connections = (self.io_bytes, earlier.io_bytes), (self.tcp_bytes, earlier.tcp_bytes)
        return sum(max(0, new[key] - old.get(key, 0)) for new, old in (files, connections) for key in new)

    def waited_since(self, earlier: ProcessActivity) -> float:
        """Seconds for which the main thread was ready and had no CPU since ``earlier``."""
        if self.is_ready and earlier.is_ready and not self.cpu_since(earlier):  # The wait has not ended.
            return self.at - earlier.at
        return max(0.0, self.run_queue_wait_s - earlier.run_queue_wait_s)

    def busiest_child(self, earlier: ProcessActivity) -> int | None:
        """The descendant that used most CPU since ``earlier``; None if none used any."""
        used = {pid: value - earlier.cpu_s.get(pid, 0.0) for pid, value in self.cpu_s.items() if pid != self.pid}
        return max(used, key=used.__getitem__) if any(value > 0 for value in used.values()) else None


def read(pid: int, connections: Connections) -> ProcessActivity:
    """The activity of ``pid`` and its descendants. ``connections``: ``tcp_connections()``, {} if none matters."""
    tree = (pid, *descendants(pid))
    own = {inode: found for each in tree for inode, found in connections_of(each, connections).items()}
    return ProcessActivity(
        pid=pid,
        at=time.monotonic(),
        cpu_s={each: _cpu_s(each) for each in tree},
        io_bytes={each: _io_bytes(each) for each in tree},
        run_queue_wait_s=_run_queue_wait_s(pid),
        is_ready=procfs.stat(pid)[procfs.STATE : procfs.STATE + 1] == [b"R"],
        tcp_bytes={inode: transferred for inode, (transferred, _) in own.items()},
        unanswered=tuple(sorted({address for _, address in own.values() if address})),
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
    return sum(procfs.read_and_written(procfs.read(f"/proc/{pid}/io")) or ())


def _run_queue_wait_s(pid: int) -> float:
    fields = procfs.read(f"/proc/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


def waits_for_input(pid: int) -> bool:
    """Whether the main thread of ``pid`` is in read(2) of its standard input; false if the kernel does not say."""
    fields = procfs.read(f"/proc/{pid}/syscall").split()
    return fields[:2] == [str(_READ_CALLS.get(os.uname().machine, -1)).encode(), b"0x0"]


Connections = dict[int, tuple[int, str]]
"""TCP connections by the inodes of their sockets.

Of each the bytes sent and received since it was connected; and the address of the peer if it does not acknowledge what
is sent again and again, otherwise empty."""


def tcp_connections() -> Connections:
    """The connection of each socket, by its inode."""
    found: Connections = {}
    with contextlib.suppress(OSError, struct.error):
        for family in (socket.AF_INET, socket.AF_INET6):
            found.update(_dump(family))
    return found


def connections_of(pid: int, connections: Connections) -> Connections:
    """Of the ``connections``, those that the process has open."""
    inodes = set()
    with contextlib.suppress(OSError):
        for target in procfs.open_files(pid):
            inodes |= {int(target[8:-1])} if target.startswith("socket:[") else set()
    return {inode: connections[inode] for inode in inodes & connections.keys()}


def _dump(family: int) -> Iterator[tuple[int, tuple[int, str]]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_LIMIT_S)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _CONNECTED_STATES)
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
        end = time.thread_time() + _LIMIT_S  # On a loaded machine, a second may pass between two answers.
        while time.thread_time() < end:
            for kind, body in _messages(kernel.recv(1 << 18)):
                if kind in (_DONE, _ERROR):
                    return
                inode = struct.unpack_from("=I", body, _INODE_AT)[0]
                yield inode, (_transferred(body[_MESSAGE_SIZE:]), _unanswered(body))


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        size, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : size]
        data = data[max((size + 3) & ~3, _HEADER.size) :]


def _unanswered(body: bytes) -> str:
    if body[_TIMER_AT] != _RETRANSMITS or body[_RETRANSMITS_AT] < _MIN_RETRANSMITS:
        return ""
    size = 4 if body[_FAMILY_AT] == socket.AF_INET else 16
    return socket.inet_ntop(body[_FAMILY_AT], body[_PEER_AT : _PEER_AT + size])


def _transferred(attributes: bytes) -> int:
    while len(attributes) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(attributes)
        if kind == _INFO and size >= _ATTRIBUTE.size + _BYTES_AT + 16:
            return sum(struct.unpack_from("=QQ", attributes, _ATTRIBUTE.size + _BYTES_AT))
        attributes = attributes[max((size + 3) & ~3, _ATTRIBUTE.size) :]
    return 0
