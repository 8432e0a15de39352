"""A RAS service as NCCL's ``src/ras/client_support.cc`` has it: its replies, and its status as JSON and as text."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Behaviour = Literal["answers", "silent", "mute", "cut", "huge", "rubbish"]


JSON = '{\n  "nccl_version": "2.28.9",\n  "communicators_count": 1\n}\n'
TEXT = "NCCL version 2.26.2 compiled with CUDA 12.8\n\nJob summary\n===========\n"
"""The begins of its two answers: nobody reads what they say but the user."""


@dataclass
class FakeRas:
    """A server on a free port of loopback; one thread, closed by ``close``.

    Attributes:
        behaviour: ``silent`` accepts and never writes, ``mute`` stops at the status, ``cut`` closes within it, ``huge``
            never ends it, ``rubbish`` is another protocol.
        knows_json: it has NCCL 2.28.7 or later.
        silent_connections: so many connections are served silently first, as by a suspended process.
    """

    behaviour: Behaviour = "answers"
    knows_json: bool = True
    silent_connections: int = 0
    commands: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                if self.behaviour == "silent" or len(self._open) <= self.silent_connections:
                    continue
                with contextlib.suppress(OSError):
                    self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        is_json = False
        for line in connection.makefile("r", encoding="ascii"):
            self.commands.append(line.strip())
            command = line.strip().lower()
            if command in ("status", "verbose status"):
                self._send_status(connection, JSON if is_json else TEXT)
                return
            is_json |= command == "set format json" and self.knows_json
            connection.sendall(self._reply(command).encode())

    def _reply(self, command: str) -> str:
        if self.behaviour == "rubbish":
            return "HTTP/1.1 400 Bad Request\n"
        if command.startswith("client protocol "):
            return "SERVER PROTOCOL 2\n"
        is_known = command.startswith("timeout ") or (self.knows_json and command.startswith("set format "))
        return "OK\n" if is_known else f"ERROR: Unknown command {command}\n"

    def _send_status(self, connection: socket.socket, status: str) -> None:
        if self.behaviour == "mute":
            return
        while self.behaviour == "huge":
            connection.sendall(status.encode())
        connection.sendall(status.encode()[: len(status) // 2 if self.behaviour == "cut" else None])
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def fake_ras(**settings: Any) -> Iterator[FakeRas]:
    server = FakeRas(**settings)
    try:
        yield server
    finally:
        server.close()
