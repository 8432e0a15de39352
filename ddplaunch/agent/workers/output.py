"""Output of workers: read from pipes, written to log files, sent to the launcher.

Runs in the agent, with one thread per worker. A full disk or a slow launcher must not block a worker.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import time
from collections.abc import Callable
from dataclasses import field, replace
from typing import TYPE_CHECKING

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import wire, write_times
from ddplaunch.protocol.launcher_agent import Output
from ddplaunch.protocol.output_runs import count_lost
from ddplaunch.system.files import kept_files

if TYPE_CHECKING:
    from pathlib import Path

BATCH_S = 0.005
_TAIL_BYTES = 16 << 10
_PARTIAL_IDLE_S = 0.1
_PARTIAL_MAX_S = 0.5


class LineBuffer:
    """Cuts a stream into whole lines; holds the unfinished last line, at most ``max_bytes`` of it.

    A carriage return also ends a line, so that progress bars are shown while they move. A carriage return at the
    end of the data stays with the unfinished line: it may be half of CR LF.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._nbytes = 0
        self._since = 0.0
        self._last = 0.0

    def add(self, data: bytes) -> bytes:
        """The lines that ``data`` completes, as one piece; a line over the limit counts as ended."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        if not cut and self._nbytes + len(data) > self._max_bytes:
            cut = len(data)
        held = self.take_rest() if cut or self._was_ended(data) else b""
        self._keep(data[cut:])
        return held + data[:cut]

    def _was_ended(self, data: bytes) -> bool:
        """Whether the held line ends in a carriage return that ``data`` does not complete to CR LF."""
        return bool(self._parts) and self._parts[-1].endswith(b"\r") and not data.startswith(b"\n")

    def _keep(self, part: bytes) -> None:
        if not part:
            return
        self._last = time.monotonic()
        if not self._parts:
            self._since = self._last
        self._parts.append(part)
        self._nbytes += len(part)

    def deadline(self) -> float | None:
        """When to show the unfinished line (``time.monotonic()``); None without one.

        That is ``_PARTIAL_IDLE_S`` after its last piece, or ``_PARTIAL_MAX_S`` after its first.
        """
        return min(self._last + _PARTIAL_IDLE_S, self._since + _PARTIAL_MAX_S) if self._parts else None

    def take_rest(self) -> bytes:
        """Remove and return the unfinished line."""
        rest = b"".join(self._parts)
        self._parts, self._nbytes = [], 0
        return rest


def matching(lines: bytes, filters: tuple[bytes, ...], prefix: bytes) -> bytes:
    """The ``lines`` that contain one of ``filters``, each with ``prefix`` and one newline."""
    if not any(filter_ in lines for filter_ in filters):
        return b""
    found = [line for line in lines.splitlines() if any(filter_ in line for filter_ in filters)]
    return b"".join(prefix + line + b"\n" for line in found)


class LogFile:
    """An append-only file. A write error does not raise: lost bytes are counted, and the first error is reported."""

    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self._path = path
        self._report = report
        self._has_reported = False
        self._fd = -1
        self._lost_bytes = 0
        try:
            self._fd = kept_files.open_to_append(path)
        except OSError as error:
            report(f"{path}: {error.strerror}")

    def write(self, data: bytes) -> None:
        """Append ``data``; after a loss, first a line with the number of lost bytes. Does not raise."""
        if self._fd < 0:
            return
        gap = f"\n... {self._lost_bytes} bytes could not be written here\n".encode() if self._lost_bytes else b""
        view = memoryview(gap + data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
            self._lost_bytes = 0
        except OSError as error:
            self._lost_bytes = len(view) if len(view) <= len(data) else self._lost_bytes + len(data)
            if not self._has_reported:
                self._has_reported = True
                self._report(f"{self._path}: {error.strerror}")

    def close(self) -> None:
        if self._fd >= 0:
            kept_files.close(self._fd)
            self._fd = -1


@dataclass
class Stream:
    """One output stream of one worker and its destinations. Only its pump thread uses it until ``Pump.join``.

    Attributes:
        header: the Output record of this stream, without bytes.
        send: passes a header and its bytes to the launcher; None keeps the stream off the console.
        copy: file for the lines that contain one of ``filters``, each after ``copy_prefix``.
        tail: the last bytes.
        written_s: time of the last bytes (``time.monotonic()``).
        lines: number of whole lines.
        on_next_output: called once, at the next bytes; any thread may set it.
        is_over: the worker has ended; any thread may set it.
    """

    header: Output
    send: Callable[[Output, bytes], bool] | None
    log: LogFile | None
    filters: tuple[bytes, ...] = ()
    copy: LogFile | None = None
    copy_prefix: bytes = b""
    tail: bytes = b""
    written_s: float = 0.0
    lines: int = 0
    on_next_output: Callable[[], None] | None = None
    is_over: bool = False
    _lost_lines: int = field(default=0, init=False)
    _is_within_line: bool = field(default=False, init=False)
    _console_lines: LineBuffer = field(default_factory=lambda: LineBuffer(wire.MAX_CHUNK_BYTES), init=False)
    _copy_lines: LineBuffer = field(default_factory=lambda: LineBuffer(wire.MAX_CHUNK_BYTES), init=False)

    def keep(self, data: bytes) -> None:
        """Write ``data`` to the log file."""
        self.written_s = time.monotonic()
        self.lines += data.count(b"\n")
        if self.on_next_output:
            on_output, self.on_next_output = self.on_next_output, None
            on_output()
        if self.log:
            self.log.write(data)
        self.tail = (self.tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        if self.copy:
            self._copy_matches(self._copy_lines.add(data))

    def opened(self, fd: int) -> Pipe:
        """The agent's end ``fd`` of the pipe, which is read into this stream."""
        return Pipe(fd, self)

    def lines_for_console(self, data: bytes) -> bytes:
        """What to ``show`` of ``data`` and what came before it: whole lines."""
        return self._console_lines.add(data) if self.send else b""

    @property
    def is_between_lines(self) -> bool:
        """What was shown ends with a line, and no line was lost since."""
        return not (self._lost_lines or self._is_within_line)

    def partial_deadline(self) -> float | None:
        """When to flush the unfinished line (``time.monotonic()``); None without one."""
        return self._console_lines.deadline()

    def flush_partial(self) -> None:
        """Show an unfinished line: a prompt, a progress bar, the end of a stream."""
        self.show(self._console_lines.take_rest())

    def show(self, data: bytes) -> None:
        """Show ``data`` on the console; what the launcher does not take is counted."""
        for start in range(0, len(data), wire.MAX_CHUNK_BYTES):
            chunk = data[start : start + wire.MAX_CHUNK_BYTES]
            goes_on, self._is_within_line = self._is_within_line, not chunk.endswith(b"\n")
            header = replace(self.header, nbytes=len(chunk), lost_lines=self._lost_lines, goes_on=goes_on)
            if self.send and self.send(header, chunk):
                self._lost_lines = 0
            else:
                self._lost_lines = count_lost(header, chunk)

    def lose(self, lines: bytes) -> None:
        """Count ``lines``, which the launcher has not taken."""
        self._lost_lines = count_lost(self.header, lines, self._lost_lines)

    def _copy_matches(self, lines: bytes) -> None:
        found = matching(lines, self.filters, self.copy_prefix)
        if found and self.copy:
            self.copy.write(found)

    def close(self) -> None:
        """Flush, send the number of lost lines and close the log file, at the end of the stream."""
        self.flush_partial()
        self._copy_matches(self._copy_lines.take_rest())
        if self._lost_lines and self.send:
            self.send(replace(self.header, lost_lines=self._lost_lines), b"")
        if self.log:
            self.log.close()


class Pipe:
    """The agent's end of a pipe of a worker, and the stream that it is read into."""

    batch_s = BATCH_S

    def __init__(self, fd: int, stream: Stream) -> None:
        self.fd = fd
        self.stream = stream
        self._written_ns = 0

    def read(self, since_ns: int) -> list[Piece]:
        """What is in the pipe now; it was written after ``since_ns``, the time of the last read."""
        data = self._take()
        if not data:
            return []
        now_ns = time.monotonic_ns()
        found = write_times.pieces(data, since_ns)
        return [(self._time(time_ns, now_ns), self, piece) for time_ns, piece in found]

    def _take(self) -> bytes:
        return os.read(self.fd, nbytes) if (nbytes := _bytes_in(self.fd)) else b""

    def _time(self, time_ns: int, now_ns: int) -> int:
        """A time that keeps the order within the pipe, whichever processes wrote the marks."""
        self._written_ns = max(self._written_ns, min(time_ns, now_ns))
        return self._written_ns


def _bytes_in(pipe: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0])


Piece = tuple[int, Pipe, bytes]
"""When it was written (``time.monotonic_ns``), to which pipe, and what."""
