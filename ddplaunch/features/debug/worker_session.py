"""A debug session in the worker: asks the agent for a terminal, and has it as stdin, stdout and stderr meanwhile.

Runs in the process that debugs, a worker or a child of one, in the thread that has stopped. Loaded at the first stop.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from ddplaunch.errors import GAVE_UP
from ddplaunch.features.debug import records as debugging
from ddplaunch.protocol import script_request
from ddplaunch.text import quote
from ddplaunch.worker.parts import connect

_STREAMS = ("stdin", "stdout", "stderr")
_LEAST_FD = 100
"""Numbers of the copies of the script's descriptors: far from those that a script gets."""

_STOPPED_WITHIN_S = 10.0


class Session:
    """The terminal of this process, from the first stop until the script goes on.

    Attributes:
        owner: pid of the process; after a fork it is not the child's.
    """

    def __init__(self, socket_name: str, worker: int, place: str, *, is_post_mortem: bool) -> None:
        """Wait for the terminal. Where there is none, end this process, unless it is a post-mortem.

        Raises:
            NoTerminal: there is none, for a post-mortem.
        """
        self.owner, self.is_post_mortem = os.getpid(), is_post_mortem
        self._saved: dict[int, int] = {}
        self._term = os.environ.get("TERM")
        answer, fds = self._ask(socket_name, worker, quote(place, 500))
        text = answer[1:].split(b"\n")[0].decode("utf-8", "replace")
        if answer[:1] == debugging.GIVEN and fds:
            self._redirect(fds[0], text)
        elif is_post_mortem:
            raise NoTerminal(text)
        else:
            _fail(f"stopped {quote(place, 500)}, and there is no terminal: {text or 'the agent has gone'}")

    def _ask(self, socket_name: str, worker: int, place: str) -> tuple[bytes, list[int]]:
        body = {"record": "SessionRequest", "worker": worker, "place": place, "is_post_mortem": self.is_post_mortem}
        try:
            self._agent = connect(socket_name, "debug")
            self._agent.sendall(json.dumps(body).encode() + b"\n")
            answer, fds, _flags, _address = socket.recv_fds(self._agent, debugging.MAX_LINE_BYTES, 1)
        except OSError as error:
            return debugging.REFUSED + str(error).encode("utf-8", "replace"), []
        return answer, fds

    def _redirect(self, terminal: int, term: str) -> None:
        _flush()
        for fd in range(3):
            with contextlib.suppress(OSError):  # The script has closed it.
                self._saved[fd] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LEAST_FD)
            os.dup2(terminal, fd)
        os.close(terminal)
        os.environ["TERM"] = term

    @contextlib.contextmanager
    def standard_streams(self) -> Iterator[None]:
        """In the ``with`` block ``sys.stdin`` and so on are the terminal, whatever the script has put there.

        ``input`` edits lines only if they are.
        """
        before = {name: getattr(sys, name) for name in _STREAMS}
        for fd, name in enumerate(_STREAMS):
            setattr(sys, name, _stream(fd, name))
        try:
            yield
        finally:
            for name, stream in before.items():
                setattr(sys, name, stream)

    def stops(self) -> None:
        """The debugger has stopped again."""
        self._tell(debugging.STOPS)

    def runs(self) -> None:
        """The script runs, up to the next stop."""
        self._tell(debugging.RUNS)

    def release(self) -> None:
        """Restore the script's own descriptors; the next stop needs another session."""
        _flush()
        for fd in range(3):
            if fd in self._saved:
                os.dup2(self._saved[fd], fd)
                os.close(self._saved[fd])
            else:
                os.close(fd)
        if self._term is None:
            os.environ.pop("TERM", None)
        else:
            os.environ["TERM"] = self._term
        self._tell(debugging.GOES_ON)
        with contextlib.suppress(OSError):
            self._agent.recv(1)  # Closed once all is shown.
        self._agent.close()

    def quit(self) -> None:
        """The user ends the job: wait for the signal that stops this process."""
        self._tell(debugging.QUITS)
        time.sleep(_STOPPED_WITHIN_S)

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            self._agent.sendall(word)


class NoTerminal(Exception):
    """There is no terminal; the message says why."""


def _stream(fd: int, name: str) -> Any:
    stream = getattr(sys, f"__{name}__")
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if stream.fileno() == fd:
            return stream
    return open(fd, "w" if fd else "r", buffering=1, closefd=False)


def _flush() -> None:
    for name in _STREAMS[1:]:
        with contextlib.suppress(Exception):
            getattr(sys, name).flush()


def _fail(reason: str) -> None:
    """End this process so that no restart follows."""
    path = os.environ.get(script_request.VARIABLE, "")
    with contextlib.suppress(OSError), open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(script_request.line("give_up", reason))
    print(f"ddplaunch: {reason}", file=sys.stderr)
    _flush()
    os._exit(GAVE_UP)
