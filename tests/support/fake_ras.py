"""A RAS service as NCCL's ``src/ras/client_support.cc`` has it: its replies, and its status as JSON and as text."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

COLLECTIVES = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")

Behaviour = Literal["answers", "silent", "mute", "cut", "huge", "rubbish"]


def rank(number: int) -> dict[str, Any]:
    """A rank that has answered."""
    process = {"rank": number, "host": "10.0.0.1", "pid": 1000 + number, "cuda_dev": number, "nvml_dev": number}
    flags = dict.fromkeys(("finalize_called", "destroy_flag", "abort_flag"), False)
    status = {"init_state": 0, "async_error": 0, **flags}
    return {**process, "status": status, "collective_counts": dict.fromkeys(COLLECTIVES, 0)}


def as_json(ranks: list[dict[str, Any]]) -> str:
    """The status of a job with one communicator."""
    communicator = {
        "hash": "0x71a9b4c2d3e4f506",
        "secondary_hash": "0x1f:0x2e",
        "size": len(ranks),
        "ranks_count": len(ranks),
        "missing_ranks_count": 0,
        "ranks": ranks,
        "missing_ranks": [],
    }
    body = {
        "nccl_version": "2.28.9",
        "cuda_runtime_version": 12080,
        "cuda_driver_version": 12080,
        "timestamp": "2026-11-22 15:00:00",
        "communicators_count": 1,
        "communicators": [communicator],
        "ras": {"collection_time_sec": 5.004, "timeouts_count": 0},
    }
    return json.dumps(body, indent=2) + "\n"


_HEAD = """\
NCCL version 2.26.2 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... ({seconds}s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         {ranks}   RUNNING  {status:>6}

Errors
======

"""

HEALTHY_TEXT = (
    _HEAD.format(seconds="0.00", ranks=8, status="OK")
    + """\
Warnings
========

"""
)


@dataclass
class FakeRas:
    """A server on a free port of loopback; one thread, closed by ``close``.

    Attributes:
        behaviour: ``silent`` accepts and never writes, ``mute`` stops at the status, ``cut`` closes within it, ``huge``
            never ends it, ``rubbish`` is another protocol.
        knows_json: it has NCCL 2.28.7 or later.
        silent_connections: so many connections are served silently first, as by a suspended process.
    """

    json: str = ""
    text: str = HEALTHY_TEXT
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
                self._send_status(connection, self.json if is_json else self.text)
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
