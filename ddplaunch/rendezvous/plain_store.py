"""What is said at the endpoint of a rendezvous without torch: the few calls of a TCPStore, and a text in its place.

Used by the process that tells that a node does not come, and by members that search the rendezvous.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import TYPE_CHECKING

from ddplaunch.protocol import wire
from ddplaunch.protocol.rendezvous import MemberSpec, NodeCannotJoin
from ddplaunch.rendezvous.store import Signer, cannot_join_key

if TYPE_CHECKING:
    from types import TracebackType


_ANSWER_S, _ASK_S = 2.0, 0.5
_VALIDATE, _SET, _GET, _ADD, _CHECK = 0, 1, 3, 4, 5
_MAGIC = 0x3C85F7CE
_READY = b"\0"
_MAX_VALUE = 1 << 16
_BEGIN, _HEARD = b"ddplaunch cannot join ", b"heard "


class ServerCannotJoin(Exception):
    """The node that should serve the rendezvous does not come. ``record`` is what it says."""

    def __init__(self, record: NodeCannotJoin) -> None:
        super().__init__(record.reason)
        self.record = record


class PlainStore:
    """A client of torch's TCPStore, in a ``with`` statement; calls raise an OSError if the store does not answer.

    A store that does not understand its protocol only closes the connection.
    """

    def __init__(self, address: str, port: int) -> None:
        self._socket = socket.create_connection((address, port), _ANSWER_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # Otherwise ``set`` takes 40 ms.
        self._socket.sendall(struct.pack("=BI", _VALIDATE, _MAGIC))

    def __enter__(self) -> PlainStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def check(self, key: str) -> bool:
        """Whether the store has ``key``."""
        self._socket.sendall(struct.pack("=BQ", _CHECK, 1) + _key(key))
        return self._receive(1) == _READY

    def get(self, key: str) -> bytes:
        """The value of a key that the store has."""
        self._socket.sendall(struct.pack("=B", _GET) + _key(key))
        (size,) = struct.unpack("=Q", self._receive(8))
        if size > _MAX_VALUE:
            raise OSError("the answer is too long")
        return self._receive(size)

    def add(self, key: str, amount: int) -> int:
        """Add to the number at ``key``. Returns the sum."""
        self._socket.sendall(struct.pack("=B", _ADD) + _key(key) + struct.pack("=q", amount))
        return int(struct.unpack("=q", self._receive(8))[0])

    def set(self, key: str, value: str) -> None:
        """Set ``key``; the store has it when this returns."""
        self._socket.sendall(struct.pack("=B", _SET) + _key(key) + _text(value.encode()))
        self.check(key)

    def _receive(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            if not (piece := self._socket.recv(size - len(received))):
                raise OSError("the store has closed the connection")
            received += piece
        return received


def _key(key: str) -> bytes:
    return _text(b"/" + key.encode())  # torch's clients put the slash before every key.


def _text(text: bytes) -> bytes:
    return struct.pack("=Q", len(text)) + text


def offer(listener: socket.socket, text: str, listeners: int) -> None:
    """Say ``text`` to everybody who connects, until so many different ``listeners`` have heard it."""
    heard: set[bytes] = set()
    while len(heard) < listeners:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_ASK_S)
            connection.sendall(_BEGIN + text.encode() + b"\n")
            answer = connection.recv(1024)
            if answer.startswith(_HEARD):
                heard.add(answer)


def _ask(address: str, port: int, name: str) -> bytes | None:
    """The text that is offered at the endpoint; None if there is none, as where a store is served.

    ``name`` of this listener is a line that differs from those of all others.
    """
    with contextlib.suppress(OSError), socket.create_connection((address, port), _ASK_S) as connection:
        received, deadline = b"", time.monotonic() + _ASK_S
        while not received.endswith(b"\n") and len(received) < _MAX_VALUE and time.monotonic() < deadline:
            if not (piece := connection.recv(4096)):
                break
            received += piece
        if received.startswith(_BEGIN) and received.endswith(b"\n"):
            connection.sendall(_HEARD + name.encode() + b"\n")
            return received.removeprefix(_BEGIN).rstrip(b"\n")
    return None


def ask_whether_it_comes(spec: MemberSpec, address: str, port: int) -> None:
    """Ask whether the node that should serve the rendezvous says there that it does not come.

    Raises:
        ServerCannotJoin: it does.
    """
    text = _ask(address, port, spec.node_id)
    line = text and Signer(spec.rendezvous.secret).verify(cannot_join_key(spec), text)
    with contextlib.suppress(wire.ProtocolError):
        if line:
            raise ServerCannotJoin(wire.decode(line, (NodeCannotJoin,)))
