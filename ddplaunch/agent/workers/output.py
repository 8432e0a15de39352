"""Output of workers: read from pipes, written to log files, sent to the launcher.

Runs in the agent, with one thread per worker. A full disk or a slow launcher must not block a worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import select
import struct
import termios
import time
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from operator import itemgetter
from typing import TYPE_CHECKING

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import wire, write_times
from ddplaunch.protocol.launcher_agent import Output
from ddplaunch.protocol.output_runs import count_lines
from ddplaunch.system.files import kept_files
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from pathlib import Path

_BATCH_S = 0.005
_TOGETHER_BYTES = 60_000
"""One record with runs of both streams: less than a piece of ``launcher_channel``."""

_BURST_BYTES = 1 << 16
"""Less is gathered for ``_BATCH_S``: one wake-up for a burst of lines costs less than one per line."""

_TAIL_BYTES = 16 << 10
_IDLE_S = 0.25
_BUSY_S, _LAST_S = 5.0, 30.0
_WAKE_S = 1.0
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
                self.lose(header, chunk)

    def lose(self, header: Output, data: bytes) -> None:
        """Count the lines of ``data``, which the launcher has not taken."""
        self._lost_lines += count_lines(header, data)

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

    batch_s = _BATCH_S

    def __init__(self, fd: int, stream: Stream) -> None:
        self.fd = fd
        self.stream = stream
        self._written_ns = 0

    def read(self, since_ns: int) -> list[_Piece]:
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


_Piece = tuple[int, Pipe, bytes]
"""When it was written (``time.monotonic_ns``), to which pipe, and what."""

_Run = tuple[Stream, bytes]
"""Output of one stream between two of the other one."""


class Pump:
    """A daemon thread that reads the pipes of one worker into their streams, in the order of writing, until their end.

    The order is that of ``protocol/write_times.py``. Whatever was written before a moment is in the pipes when that
    moment has passed; so all pipes are read after it, and what was written later waits for the next turn.
    """

    def __init__(self, pipes: dict[int, Stream], name: str) -> None:
        """``pipes`` are the agent's ends, which the thread closes."""
        self._pipes = [stream.opened(fd) for fd, stream in pipes.items()]
        self._batch_s = min(pipe.batch_s for pipe in self._pipes)
        self._steps = 0
        self._shown_ns = 0  # What was written before is shown, and a process still holds each pipe that is open.
        self._thread = in_thread(name, self._run)

    def join(self, deadline: float, ended_at: float) -> bool:
        """Wait for the end of the pipes until ``deadline``; False if a process holds one. Times: ``time.monotonic()``.

        What was written before ``ended_at`` may take ``_LAST_S`` more; others that still write are given ``_BUSY_S``.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        steps, moved = -1, 0.0
        while self._thread.is_alive():
            now = time.monotonic()
            if steps != self._steps:
                steps, moved = self._steps, now
            idle_s, in_all_s = (_IDLE_S, _BUSY_S) if self._shown_ns > ended_at * 1e9 else (_BUSY_S, _LAST_S)
            if now >= moved + idle_s or now >= deadline + in_all_s:
                break
            self._thread.join(_IDLE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._read_all()
        finally:  # After a bug, too.
            self._close(self._pipes)

    def _read_all(self) -> None:
        poll = select.poll()
        for pipe in self._pipes:
            poll.register(pipe.fd, select.POLLIN)
        read_ns = time.monotonic_ns()
        later: list[_Piece] = []
        while self._pipes:
            events = dict(poll.poll(0 if later else self._wait_ms()))
            since_ns, read_ns = read_ns, time.monotonic_ns()
            ended = [pipe for pipe in self._pipes if events.get(pipe.fd, 0) == select.POLLHUP]
            found = [piece for pipe in self._pipes for piece in pipe.read(since_ns)]
            written = sorted(later + found, key=itemgetter(0))
            count = bisect(written, read_ns, key=itemgetter(0))
            later = written[count:]
            self._write(written[:count])
            self._flush_partial()
            for pipe in ended:
                poll.unregister(pipe.fd)
            self._close(ended)
            if self._pipes and not any(event & select.POLLHUP for _, event in poll.poll(0)):
                self._shown_ns = read_ns
            if found and sum(len(piece) for *_, piece in found) < _BURST_BYTES:
                time.sleep(self._batch_s)

    def _wait_ms(self) -> float:
        """Until an unfinished line is to be shown; at most ``_WAKE_S``, so that ``join`` learns that all is shown."""
        deadlines = [deadline for pipe in self._pipes if (deadline := pipe.stream.partial_deadline()) is not None]
        now = time.monotonic()
        return max(0.0, min([now + _WAKE_S, *deadlines]) - now) * 1000

    def _flush_partial(self) -> None:
        """Show the unfinished lines that are due."""
        now = time.monotonic()
        for pipe in self._pipes:
            deadline = pipe.stream.partial_deadline()
            if deadline is not None and deadline <= now:
                pipe.stream.flush_partial()

    def _write(self, pieces: list[_Piece]) -> None:
        for pipe in self._pipes:
            if data := b"".join(piece for _, of, piece in pieces if of is pipe):
                self._steps += 1
                pipe.stream.keep(data)
        runs: list[_Run] = []
        for pipe, run in itertools.groupby(pieces, key=itemgetter(1)):
            stream, lines = pipe.stream, pipe.stream.lines_for_console(b"".join(piece for *_, piece in run))
            if lines and runs and runs[-1][0] is stream:
                runs[-1] = (stream, runs[-1][1] + lines)
            elif lines:
                runs.append((stream, lines))
        for together in _divided(runs):
            self._steps += 1
            _show(together)

    def _close(self, pipes: list[Pipe]) -> None:
        self._pipes = [pipe for pipe in self._pipes if pipe not in pipes]
        for pipe in pipes:  # First: what follows may fail, and a worker must not wait for a reader that has gone.
            os.close(pipe.fd)
        with contextlib.ExitStack() as stack:  # An error of one keeps no other from its end.
            for pipe in pipes:
                stack.callback(pipe.stream.close)


def _divided(runs: list[_Run]) -> Iterator[list[_Run]]:
    """Parts of ``runs``, each of ``_TOGETHER_BYTES`` or a single run."""
    part: list[_Run] = []
    nbytes = 0
    for stream, data in runs:
        if part and nbytes + len(data) > _TOGETHER_BYTES:
            yield part
            part, nbytes = [], 0
        part.append((stream, data))
        nbytes += len(data)
    if part:
        yield part


def _show(runs: list[_Run]) -> None:
    """Show ``runs`` of one worker in this order: by one record, as far as they are whole lines."""
    if len(runs) == 1 or not all(stream.is_between_lines and data.endswith(b"\n") for stream, data in runs):
        for stream, data in runs:
            stream.show(data)
        return
    first, whole = runs[0][0], b"".join(data for _, data in runs)
    header = replace(first.header, nbytes=len(whole), runs=tuple(len(data) for _, data in runs))
    if first.send and not first.send(header, whole):
        for stream, data in runs:
            stream.lose(stream.header, data)
