"""The TCP connections of this network namespace: sock_diag(7), which needs no privileges.

/proc/PID/io does not count recv(2) and send(2), so a download would not show there. Empty where the kernel has no
sock_diag.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

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


class Connection(NamedTuple):
    """One TCP connection.

    Attributes:
        transferred: bytes sent and received since it was connected.
        unanswered: address of the peer if it does not acknowledge what is sent again and again; empty otherwise.
    """

    transferred: int
    unanswered: str = ""


def by_inode() -> dict[int, Connection]:
    """The connection of each socket, by its inode."""
    found: dict[int, Connection] = {}
    with contextlib.suppress(OSError, struct.error):
        for family in (socket.AF_INET, socket.AF_INET6):
            found.update(_dump(family))
    return found


def of_process(pid: int, connections: dict[int, Connection]) -> dict[int, Connection]:
    """Of the ``connections``, those that the process has open."""
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                inodes |= {int(target[8:-1])} if target.startswith("socket:[") else set()
    return {inode: connections[inode] for inode in inodes & connections.keys()}


def _dump(family: int) -> Iterator[tuple[int, Connection]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_LIMIT_S)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _CONNECTED_STATES)
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
        end = time.monotonic() + _LIMIT_S
        while time.monotonic() < end:
            for kind, body in _messages(kernel.recv(1 << 18)):
                if kind in (_DONE, _ERROR):
                    return
                connection = Connection(_transferred(body[_MESSAGE_SIZE:]), _unanswered(body))
                yield struct.unpack_from("=I", body, _INODE_AT)[0], connection


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
