"""Reads console.log, or another file, from its last lines on, while another process writes it; and writes to stdout.

Runs in the process that the user started. It only reads the file: however slow or stopped this process is, the writer
never waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
from typing import TYPE_CHECKING

from ddplaunch.system.files import kept_files
from ddplaunch.text import escape

if TYPE_CHECKING:
    from pathlib import Path


POLL_S = 0.05
_READ_BYTES = 1 << 20
_KEPT_BYTES = 1 << 16
_LAST_BYTES = 1 << 18
"""The last lines are looked for in so many bytes."""


class LogFollower:
    """One file, which may not exist yet. When it grows too large, its writer renames it to ``NAME.1``.

    Attributes:
        has_gap: a part of the file was deleted before it was read.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self._earlier = folder / name, folder / f"{name}.1"
        self._fd = -1
        self.has_gap = False

    def last_lines(self, count: int) -> bytes:
        """The last ``count`` lines; ``read`` goes on behind them. Call it first."""
        if not self._open(self._path):
            return b""
        size = os.fstat(self._fd).st_size
        start = max(0, size - _LAST_BYTES)
        data = os.pread(self._fd, size - start, start)
        os.lseek(self._fd, start + len(data), os.SEEK_SET)
        lines = io.BytesIO(data).readlines()  # ``splitlines`` would also split a progress bar, at carriage returns.
        return self._shown(b"".join(lines[-count:] if count else []))

    def read(self) -> bytes:
        """What was written next, of at most 1 MB; empty if there is nothing more yet."""
        return self._shown(self._read())

    def _read(self) -> bytes:
        if self._fd < 0 and not self._open(self._path):
            return b""
        # In this order: what was written before a rename is read before the next file is opened.
        next_path = self._next_path()
        data = os.read(self._fd, _READ_BYTES)
        if not data and next_path and self._open(next_path):
            data = os.read(self._fd, _READ_BYTES)
        elif not data and os.fstat(self._fd).st_size < os.lseek(self._fd, 0, os.SEEK_CUR):
            os.lseek(self._fd, 0, os.SEEK_SET)  # Somebody has emptied it, as by `> console.log`.
            self.has_gap = True
            data = os.read(self._fd, _READ_BYTES)
        return data

    def progress(self) -> tuple[int, int]:
        """How many bytes of the present file were read, and how many it has."""
        return (os.lseek(self._fd, 0, os.SEEK_CUR), os.fstat(self._fd).st_size) if self._fd >= 0 else (0, 0)

    def skip(self, max_bytes: int) -> int:
        """Leave out what is to be read, if it is more than ``max_bytes``, up to its last lines. Returns its length."""
        if self._fd < 0:
            return 0
        position, size = os.lseek(self._fd, 0, os.SEEK_CUR), os.fstat(self._fd).st_size
        if size - position <= max_bytes:
            return 0
        os.lseek(self._fd, size - _KEPT_BYTES, os.SEEK_SET)
        kept = os.read(self._fd, _KEPT_BYTES)
        begin = size - _KEPT_BYTES + kept.find(b"\n") + 1
        os.lseek(self._fd, begin, os.SEEK_SET)
        return begin - position

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _shown(self, data: bytes) -> bytes:
        return shown(data, is_own=not data or os.fstat(self._fd).st_uid == os.geteuid())

    def _next_path(self) -> Path | None:
        """The file that follows the present one, if its writer has begun another."""
        present = _identity(os.fstat(self._fd))
        names = {path: _identity_of(path) for path in (self._path, self._earlier)}
        if names[self._path] in (present, None):
            return None
        if names[self._earlier] == present or names[self._earlier] is None:
            return self._path
        self.has_gap = True  # Unless it is just the next one, which cannot be known.
        return self._earlier

    def _open(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            fd = kept_files.regular_fd(path)
            self.close()
            self._fd = fd
            return True
        return False


def shown(data: bytes, *, is_own: bool) -> bytes:
    """``data`` of a file; a text of another user, whose folder is in --log-dir, must not steer the terminal."""
    return data if is_own else escape(data.decode("utf-8", "replace")).encode("utf-8", "replace")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _identity_of(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        return _identity(os.stat(path))
    return None


# Standard output: a terminal, or a pipe whose reader may be slow, or may have gone. Nothing is held back in a buffer.


def write_stdout(data: bytes) -> None:
    """Write all of ``data``, however long that takes.

    Raises:
        OSError: it cannot be written; BrokenPipeError: nobody reads it any more.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(1, view) :]
        except BlockingIOError:  # Another process made the terminal or pipe non-blocking, as ssh does.
            select.select([], [1], [])


def pause(seconds: float) -> None:
    """Wait, but end where nobody reads stdout any more: a run without output would keep its viewers for ever.

    Raises:
        BrokenPipeError: the reader of the pipe, or the terminal, has gone.
    """
    poll = select.poll()
    poll.register(1, 0)  # poll(2): errors and hang-ups are reported without being asked for.
    if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(seconds * 1000)):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
