"""The launcher's end of the control socket.

Runs in the launcher: a thread for each client reads its request, posts it to the launcher's mailbox and sends the
answer. A client that sends garbage, hangs or dies costs its own thread some seconds, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddplaunch import features
from ddplaunch.errors import Level
from ddplaunch.launcher.watches import Reply, RunServices, Watch
from ddplaunch.protocol import wire
from ddplaunch.protocol.control import (
    ANSWER_S,
    MAX_REQUEST_BYTES,
    SOCKET,
    TO_LAUNCHER,
    Request,
    RequestGranted,
    RequestRefused,
    StopRun,
)
from ddplaunch.system import unix_socket
from ddplaunch.system.files import kept_files
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from pathlib import Path


_MAX_CLIENTS = 8
_TRANSFER_S = 5.0
"""Time limit of a request that a client sends, and of an answer that it reads."""


class Control(Watch):
    """Serves the control socket of one run; a run without a folder has none."""

    def __init__(self, run: RunServices) -> None:
        self._run = run
        self._socket: ControlSocket | None = None
        if folder := run.folder():
            try:
                self._socket = ControlSocket(folder, lambda *asked: run.post(lambda: self._on_request(*asked)))
            except (OSError, RuntimeError) as error:  # RuntimeError: the limit of threads.
                effect = "--stacks will not work with this run, and --attach cannot stop it"
                text = f"{effect}: {folder / SOCKET}: {error}"
                run.post(lambda: run.messages.show(text, Level.VERBOSE))

    def _on_request(self, request: Request, reply: Reply) -> None:
        """Answer a request, now or later."""
        if request.run_tag != self._run.run_tag:
            reply(RequestRefused("another run of this process"))
        elif isinstance(request, StopRun):
            reply(RequestGranted())
            self._run.shutdown.on_stop_request()
        elif not self._run.ask(request, reply):
            reply(RequestRefused("not a request that this version knows"))

    def on_loop_ended(self) -> None:
        """Tell clients that wait for an answer that the run ends."""
        if self._socket:
            self._socket.close()


class ControlSocket:
    """The socket, until ``close``."""

    def __init__(self, folder: Path, post: Callable[[Request, Reply], None]) -> None:
        """Open the socket.

        Raises:
            OSError: the folder takes no socket.
            RuntimeError: no thread can be started.
        """
        self._post = post
        self._closed = threading.Event()
        self._places = threading.BoundedSemaphore(_MAX_CLIENTS)
        self._waiting: set[queue.SimpleQueue[object]] = set()
        self._server = unix_socket.LocalServer("control", self._admit)
        # The folder may be renamed, and a socket's path has at most 107 bytes: both are reached by this descriptor. It
        # also shows other processes where the socket is: /proc/PID/fd.
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._server.open_at(f"/proc/self/fd/{self._folder_fd}/{SOCKET}")
        except BaseException:
            kept_files.close(self._folder_fd)
            raise

    def close(self) -> None:
        """Remove the socket; clients that wait for an answer are told that the run ends."""
        self._closed.set()
        self._server.close()
        for answers in tuple(self._waiting):
            answers.put(RequestRefused("the run ends"))
        with contextlib.suppress(OSError):
            os.unlink(SOCKET, dir_fd=self._folder_fd)
        kept_files.close(self._folder_fd)

    # In the thread that accepts.

    def _admit(self, connection: unix_socket.Connection) -> bool:
        client = connection.socket
        if not self._places.acquire(blocking=False):
            _refuse(client, "too many requests at once")
        else:
            try:
                in_thread("client", lambda: self._serve(client))
            except RuntimeError:
                self._places.release()
                _refuse(client, "no more threads")
        return True

    # In a client's thread.

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, contextlib.suppress(OSError):
                answer = self._answer(_read_line(client))
                client.settimeout(_TRANSFER_S)
                client.sendall(wire.encode(answer))
        finally:
            self._places.release()

    def _answer(self, line: bytes) -> object:
        try:
            request = wire.decode(line, TO_LAUNCHER, lambda: features.records("TO_LAUNCHER"))
        except wire.ProtocolError:
            return RequestRefused("not a request that this version knows")
        answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._waiting.add(answers)
        try:
            if self._closed.is_set():
                return RequestRefused("the run ends")
            self._post(request, answers.put)
            return answers.get(timeout=ANSWER_S)
        except queue.Empty:
            return RequestRefused(f"the launcher has not answered for {ANSWER_S:g} s")
        finally:
            self._waiting.discard(answers)


def _read_line(client: socket.socket) -> bytes:
    """The client's line; at most MAX_REQUEST_BYTES of it, within ``_TRANSFER_S``.

    Raises:
        OSError: too slow, or the client has gone.
    """
    deadline, line = time.monotonic() + _TRANSFER_S, b""
    while not line.endswith(b"\n") and len(line) < MAX_REQUEST_BYTES:
        client.settimeout(max(0.001, deadline - time.monotonic()))
        data = client.recv(MAX_REQUEST_BYTES - len(line))
        if not data or time.monotonic() > deadline:
            raise TimeoutError
        line += data
    return line


def _refuse(client: socket.socket, reason: str) -> None:
    with client, contextlib.suppress(OSError):
        client.send(wire.encode(RequestRefused(reason)), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (Control(run),)
