"""Bytes that each TCP connection of this network namespace has transferred: sock_diag(7), which needs no privileges.

/proc/PID/io does not count recv(2) and send(2), so a download would not show there. Empty where the kernel has no
sock_diag.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import TYPE_CHECKING

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
_ATTRIBUTE = struct.Struct("=HH")
_BYTES_AT = 120
"""In tcp_info: bytes_acked, bytes_received."""

_LIMIT_S = 1.0


def by_inode() -> dict[int, int]:
    """Inode of each socket -> bytes sent and received since it was connected."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError, struct.error):
        for family in (socket.AF_INET, socket.AF_INET6):
            found.update(_dump(family))
    return found


def of_process(pid: int, totals: dict[int, int]) -> dict[int, int]:
    """Of the sockets in ``totals``, those that the process has open."""
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                inodes |= {int(target[8:-1])} if target.startswith("socket:[") else set()
    return {inode: totals[inode] for inode in inodes & totals.keys()}


def _dump(family: int) -> Iterator[tuple[int, int]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_LIMIT_S)
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _CONNECTED_STATES)
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
        end = time.monotonic() + _LIMIT_S
        while time.monotonic() < end:
            for kind, body in _messages(kernel.recv(1 << 18)):
                if kind in (_DONE, _ERROR):
                    return
                yield struct.unpack_from("=I", body, _INODE_AT)[0], _transferred(body[_MESSAGE_SIZE:])


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        size, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : size]
        data = data[max((size + 3) & ~3, _HEADER.size) :]


def _transferred(attributes: bytes) -> int:
    while len(attributes) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(attributes)
        if kind == _INFO and size >= _ATTRIBUTE.size + _BYTES_AT + 16:
            return sum(struct.unpack_from("=QQ", attributes, _ATTRIBUTE.size + _BYTES_AT))
        attributes = attributes[max((size + 3) & ~3, _ATTRIBUTE.size) :]
    return 0
