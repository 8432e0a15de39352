"""Records that carry descriptors over a unix socket: 8 bytes with the length and the descriptors, then the record.

Used between agent and forkserver, and with a keeper. A receiver closes descriptors of a record that it refuses.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from ddplaunch.protocol import wire

_HEADER_BYTES = 8
_PIECE_BYTES = 1 << 20


def send(sock: socket.socket, record: object, fds: Sequence[int] = ()) -> None:
    """Send a record with descriptors, which the caller may close after the call.

    Raises:
        OSError: the other process has gone, or it does not read within the socket's timeout.
    """
    body = wire.encode(record)
    socket.send_fds(sock, [len(body).to_bytes(_HEADER_BYTES, "big")], list(fds))
    sock.sendall(body)


def receive(
    sock: socket.socket,
    allowed: tuple[type, ...],
    max_fds: int,
    max_bytes: int = wire.MAX_LINE_BYTES,
    deadline: float | None = None,
) -> tuple[Any, list[int]] | None:
    """The next record and its descriptors, at most ``max_fds``; None at the end of the stream.

    ``deadline``, by ``time.monotonic()``, ends the wait for a record that arrives in small pieces.

    Raises:
        ProtocolError: not one of ``allowed``, or longer than ``max_bytes``.
        OSError: the connection is broken, nothing arrives within the socket's timeout, or ``deadline`` has passed.
    """
    # The descriptors come with the 8 bytes of the length.
    header, fds, _flags, _address = socket.recv_fds(sock, _HEADER_BYTES, max_fds)
    try:
        body = _body(sock, header, max_bytes, deadline)
        if body is not None:
            return wire.decode(body, allowed), fds
    except BaseException:
        close(fds)
        raise
    close(fds)
    return None


def close(fds: Sequence[int]) -> None:
    """Close descriptors that have arrived."""
    for fd in fds:
        os.close(fd)


def _body(sock: socket.socket, header: bytes, max_bytes: int, deadline: float | None) -> bytes | None:
    if len(header) < _HEADER_BYTES:
        return None
    remaining = int.from_bytes(header, "big")
    if remaining > max_bytes:
        raise wire.ProtocolError(f"a record of {remaining} bytes")
    chunks = []
    while remaining:
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError("the record has not arrived in time")
        chunk = sock.recv(min(remaining, _PIECE_BYTES))
        if not chunk:
            return None
        chunks.append(chunk)
        remaining -= len(chunk)
    return b"".join(chunks)
