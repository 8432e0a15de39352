"""Sends the launcher a node's log files at the end of its part in a run, in pieces and only as fast as it takes them.

A thread reads the files and waits for the launcher; the agent's main thread goes on answering it meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddplaunch.agent.events import LauncherGone, Signalled
from ddplaunch.logs import (
    CHUNK_BYTES,
    MAX_FILES,
    WINDOW_BYTES,
    LogChunk,
    LogsFound,
    LogsSent,
    LogsWanted,
    cost,
    is_safe,
)
from ddplaunch.records import Ping, Pong

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ddplaunch.agent.outbox import Outbox
    from ddplaunch.mailbox import Mailbox


@dataclass(frozen=True)
class _AllSent:
    """The launcher has taken everything."""


class LogSender:
    """The last thing an agent does; main thread only."""

    def __init__(self, outbox: Outbox, mailbox: Mailbox[object]) -> None:
        self._outbox = outbox
        self._mailbox = mailbox
        self._folder: Path | None = None
        self._is_gone = threading.Event()
        self._wanted = _Wanted()

    def prepare(self, folder: Path, is_gone: threading.Event) -> None:
        """What ``send`` is to send; nothing without this call. ``is_gone`` is set once the launcher is gone."""
        self._folder, self._is_gone = folder, is_gone

    def send(self) -> None:
        """Send all files; returns when the launcher has them, or wants no more, or is gone."""
        if self._folder is None or self._is_gone.is_set():
            return
        reader = threading.Thread(target=self._send_all, args=(self._folder,), name="logs", daemon=True)
        try:
            reader.start()
        except RuntimeError:  # No room for a thread.
            return
        while True:
            match self._mailbox.get():
                case Ping():
                    self._outbox.send(Pong())
                case LogsWanted(nbytes=nbytes) if nbytes > 0:
                    self._wanted.add(nbytes)
                case LogsWanted() | _AllSent() | LauncherGone() | Signalled():
                    return

    # The thread that reads files.

    def _send_all(self, folder: Path) -> None:
        files, left_out = find(folder)
        self._outbox.send(LogsFound(len(files), sum(files.values())))
        for path in files:
            left_out += not self._send_file(folder, path)
        self._wanted.take(WINDOW_BYTES)  # All of it again: nothing is on the way any more.
        self._outbox.send(LogsSent(left_out))
        self._mailbox.post(_AllSent())

    def _send_file(self, folder: Path, path: str) -> bool:
        """False if it cannot be read; what was read by then is not taken for the whole."""
        try:
            fd = os.open(folder / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return False
            for chunk, data in _chunks(fd, path, status.st_size):
                self._wanted.take(cost(chunk))
                self._outbox.send_file(chunk, data)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True


class _Wanted:
    """How many bytes the launcher takes by now; it adds, the thread that reads takes."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._changed = threading.Condition()

    def add(self, nbytes: int) -> None:
        with self._changed:
            self._nbytes += nbytes
            self._changed.notify()

    def take(self, nbytes: int) -> None:
        """Wait until there are so many."""
        with self._changed:
            self._changed.wait_for(lambda: self._nbytes >= nbytes)
            self._nbytes -= nbytes


def find(folder: Path) -> tuple[dict[str, int], int]:
    """The files of a node's attempts with their sizes, by path below ``folder``; and how many more are left out."""
    found: dict[str, int] = {}
    left_out = 0
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.relpath(os.path.join(parent, name), folder)
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                if len(found) < MAX_FILES and stat.S_ISREG(status.st_mode) and is_safe(path):
                    found[path] = status.st_size
                else:
                    left_out += 1
    return found, left_out


def _chunks(fd: int, path: str, size: int) -> Iterator[tuple[LogChunk, bytes]]:
    """All of a file as it was when it had ``size`` bytes; one that still grows has an end all the same."""
    left = size
    while True:
        data = os.read(fd, min(left, CHUNK_BYTES))
        left -= len(data)
        is_last = left <= 0 or not data
        yield LogChunk(path, len(data), is_last), data
        if is_last:
            return
