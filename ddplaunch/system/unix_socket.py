"""Unix sockets between processes of this user: a server, which accepts connections in a thread, and a question to one.

Used by launcher, agent and commands. Does not know what is said. Opens no port.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from ddplaunch.system import linux
from ddplaunch.threads import in_thread

_PASSING, _PAUSE_S = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED), 1.0
"""Errors of accept(2) after which it is called again, after a pause."""


class Connection(NamedTuple):
    """A process of this user has connected.

    Attributes:
        socket: who takes the connection closes it.
        pid: the process. The kernel tells it (SO_PEERCRED), so it cannot be forged.
        address: what the process has bound its end to in Linux's abstract namespace; empty: nothing.
    """

    socket: socket.socket
    pid: int
    address: bytes


class LocalServer:
    """A unix socket, whose connections a daemon thread accepts and hands over. Other users' are closed."""

    def __init__(self, name: str, take: Callable[[Connection], bool]) -> None:
        """``take`` is called for each connection, in the thread ``name``; false: nobody wants it, and it is closed."""
        self._thread_name = name
        self._take = take
        self._name: str | None = None
        self._listener: socket.socket | None = None

    def open(self) -> str:
        """Open it in Linux's abstract namespace (unix(7)) if it is not open.

        Returns:
            Its name there; empty if it cannot be opened.
        """
        if self._name is None:
            self._name = ""
            with contextlib.suppress(OSError):
                name = f"ddplaunch.{os.urandom(8).hex()}"
                self._listen(f"\0{name}")
                self._name = name
        return self._name

    def open_at(self, path: str) -> None:
        """Open it as the file ``path``, which only this user may use; the caller removes the file at the end.

        Raises:
            OSError: there is such a file, or the folder takes no socket.
            RuntimeError: no room for a thread. In both cases no file is left.
        """
        self._listen(path, is_file=True)

    def _listen(self, address: str, *, is_file: bool = False) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as on_error:
            on_error.callback(listener.close)
            listener.bind(address)
            if is_file:
                on_error.callback(os.unlink, address)
                os.chmod(address, 0o600)  # Nobody can connect before ``listen``.
            listener.listen(socket.SOMAXCONN)
            in_thread(self._thread_name, lambda: self._accept_all(listener))
            on_error.pop_all()
        self._listener = listener

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
                try:
                    is_taken = self._hand_over(accepted, address)
                except Exception:  # A bug: the connections of others must be accepted all the same.
                    is_taken = False
                    traceback.print_exc()
                if not is_taken:
                    accepted.close()

    def _hand_over(self, accepted: socket.socket, address: object) -> bool:
        pid, uid = linux.peer_credentials(accepted)
        abstract = address if isinstance(address, bytes) else b""  # A text is the path of a file, or empty.
        return uid == os.geteuid() and self._take(Connection(accepted, pid, abstract))

    def close(self) -> None:
        """Accept no more; connections that were taken stay open."""
        if self._listener:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread, which closes it.


def ask(path: str, pid: int, line: bytes, deadline: float, max_bytes: int) -> bytes:
    """The answer of process ``pid``, which serves ``path``; ``deadline`` is by ``time.monotonic()``.

    Raises:
        OSError: there is none; another process serves it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.connect(path)
        if linux.peer_credentials(connection)[0] != pid:
            raise ConnectionError("another process serves it")
        connection.sendall(line)
        with connection.makefile("rb") as stream:
            answer = stream.readline(max_bytes)
    if not answer.endswith(b"\n"):
        raise ConnectionError("the launcher has closed the connection")
    return answer
