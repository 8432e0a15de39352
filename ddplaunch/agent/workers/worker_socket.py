"""The agent's socket for its workers: what features run in a worker connects to it, and talks to the feature's part.

Runs in the agent: a daemon thread accepts connections and hands them over. The socket is in Linux's abstract namespace
(unix(7)); workers with the bootstrap have its name in their environment until the script runs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from ddplaunch.system import linux

if TYPE_CHECKING:
    from collections.abc import Callable

_PASSING, _PAUSE_S = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED), 1.0
"""Errors of accept(2) after which it is called again, after a pause."""


class Connection(NamedTuple):
    """A process of this user has connected.

    Attributes:
        socket: who takes the connection closes it.
        pid: the process. The kernel tells it (SO_PEERCRED), so it cannot be forged.
        is_bound: the process has given its socket an address: that tells one purpose from another.
    """

    socket: socket.socket
    pid: int
    is_bound: bool


class WorkerSocket:
    """The socket of one agent, for all attempts."""

    def __init__(self, take: Callable[[Connection], bool]) -> None:
        """``take`` is called in the thread of the socket for each connection; false: nobody wants it."""
        self._take = take
        self._name: str | None = None
        self._listener: socket.socket | None = None

    def open(self) -> str:
        """Open the socket if it is not open. Returns its name; empty if it cannot be opened."""
        if self._name is None:
            self._name = ""
            with contextlib.suppress(OSError):
                self._name = self._listen(f"ddplaunch.{os.urandom(8).hex()}")
        return self._name

    def _listen(self, name: str) -> str:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{name}")
        self._listener.listen(socket.SOMAXCONN)
        threading.Thread(target=self._accept_all, args=(self._listener,), name="worker socket", daemon=True).start()
        return name

    def _accept_all(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError), listener:
            while True:
                try:
                    accepted, address = listener.accept()
                except OSError as error:
                    if error.errno not in _PASSING:
                        raise
                    time.sleep(_PAUSE_S)
                    continue
                pid, uid = linux.peer_credentials(accepted)
                if uid != os.getuid() or not self._take(Connection(accepted, pid, bool(address))):
                    accepted.close()

    def close(self) -> None:
        """Close the socket; connections that were taken stay open."""
        if self._listener:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread, which closes it.
