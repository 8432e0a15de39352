"""Marks in a worker's output, from which the agent knows the order of stdout and stderr (``protocol/write_times.py``).

Only what Python's streams write has marks: they have no buffer, since workers run as under ``python -u``. The output of
other libraries and of child processes has none, and stands in the order of its own stream. Runs in the worker. Must
import little.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
import time

from ddplaunch.protocol.write_times import MARK_BYTES, mark


class _Marking:
    """Writes the first piece of a stream after one of the other stream, with a mark before it.

    It does so in place of ``FileIO.write`` of the stream's file, which writes what follows: that costs what it costs
    without marks. There is no mark while the descriptor is another file: the script may have redirected it.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._pipe = _identity(file.fileno())
        self._is_terminal = os.isatty(file.fileno())
        self.other = self

    def begin(self) -> None:
        """The next piece of this stream gets a mark."""
        self._file.write = self._write  # type: ignore[method-assign, assignment]

    def _write(self, data: bytes) -> int | None:
        fd = self._file.fileno()
        if _identity(fd) != self._pipe or (self._is_terminal and not os.get_blocking(fd)):  # It would take half a mark.
            return io.FileIO.write(self._file, data)
        vars(self._file).pop("write", None)
        self.other.begin()
        return _write_marked(self._file.fileno(), data)


def _write_marked(fd: int, data: bytes) -> int | None:
    """As ``FileIO.write``. No other writer comes within a mark: writes of up to PIPE_BUF are whole (pipe(7))."""
    head = mark(time.monotonic_ns())
    try:
        if MARK_BYTES + memoryview(data).nbytes <= select.PIPE_BUF:
            return os.writev(fd, (head, data)) - MARK_BYTES
        os.write(fd, head)
        return os.write(fd, data)
    except BlockingIOError:  # The script, or a program that it has started, has made the pipe non-blocking.
        return None


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def mark_streams() -> None:
    """Mark stdout and stderr if the agent reads both, which removes the marks."""
    files = [stream.buffer for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    found = [_Marking(file) for file in files if type(file) is io.FileIO and _is_read_by_agent(file.fileno())]
    if len(found) == 2 and _identity(files[0].fileno()) != _identity(files[1].fileno()):
        found[0].other, found[1].other = found[1], found[0]
        for marking in found:
            marking.begin()
            os.register_at_fork(after_in_child=marking.begin)


def _is_read_by_agent(fd: int) -> bool:
    """Whether it is a pipe; or a pseudo-terminal without output processing: no user's terminal is one."""
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        return True
    if not os.isatty(fd):
        return False
    import termios

    return not termios.tcgetattr(fd)[1] & termios.OPOST
