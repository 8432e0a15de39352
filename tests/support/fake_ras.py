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


def rank(number: int, *, host: str = "10.0.0.1", pid: int = 0, error: int = 0, **counts: int) -> dict[str, Any]:
    """A rank that has answered."""
    status = {"init_state": 0, "async_error": error}
    flags = dict.fromkeys(("finalize_called", "destroy_flag", "abort_flag"), False)
    all_counts = {name: counts.get(name, 0) for name in COLLECTIVES}
    return {**_process(number, host, pid), "status": {**status, **flags}, "collective_counts": all_counts}


def missing(number: int, *, host: str = "10.0.0.1", pid: int = 0, is_dead: bool = False) -> dict[str, Any]:
    """A rank whose process has not answered."""
    return {**_process(number, host, pid), "status": {"unresponsive": True, "considered_dead": is_dead}}


def _process(number: int, host: str, pid: int) -> dict[str, Any]:
    return {"rank": number, "host": host, "pid": pid or 1000 + number, "cuda_dev": number, "nvml_dev": number}


def as_json(ranks: list[dict[str, Any]], absent: list[dict[str, Any]]) -> str:
    """The status of a job with one communicator."""
    communicator = {
        "hash": "0x71a9b4c2d3e4f506",
        "secondary_hash": "0x1f:0x2e",
        "size": len(ranks) + len(absent),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(absent),
        "ranks": ranks,
        "missing_ranks": absent,
    }
    body = {
        "nccl_version": "2.28.9",
        "cuda_runtime_version": 12080,
        "cuda_driver_version": 12080,
        "timestamp": "2026-11-22 15:00:00",
        "communicators_count": 1,
        "communicators": [communicator],
        "ras": {"collection_time_sec": 5.004, "timeouts_count": len(absent)},
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

BAD_TEXT = (
    _HEAD.format(seconds="5.01", ranks=7, status="INCOMPLETE")
    + """\
INCOMPLETE
  Missing communicator data from 1 job process
  Process 4105 on node 10.0.0.2 managing GPU 1

#0-0 (71a9b4c2d3e4f506) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 1 managed by process 4105 on node 10.0.0.2

#0-0 (71a9b4c2d3e4f506) ERROR
  Asynchronous error on 1 rank
  Rank 7 reported Remote process error -- GPU 3 managed by process 4107 on node 10.0.0.2

Warnings
========

TIMEOUT
  Encountered 1 communication timeout while gathering communicator data

#0-0 (71a9b4c2d3e4f506) MISMATCH
  Communicator ranks have different AllReduce operation counts
  5 ranks have launched up to operation 2892
  Rank 0 -- GPU 0 managed by process 4100 on node 10.0.0.1
  Rank 1 -- GPU 1 managed by process 4101 on node 10.0.0.1
  Rank 3 -- [process information not found]
  Rank 2 has launched up to operation 2891 -- GPU 2 (NVML 6) managed by process 4102 on node 10.0.0.1
  Rank 7 has not launched any operations -- GPU 3 managed by process 4107 on node 10.0.0.2

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
