"""Output of workers and helpers: read from pipes, written to log files, sent to the launcher.

Runs in the agent, with one thread per pipe. A full disk or a slow launcher must not block a worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from dataclasses import field, replace
from pathlib import Path

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import Notice, Output, count_lines
from ddplaunch.system.files import kept_files
from ddplaunch.system.linux import enlarge_pipe
from ddplaunch.threads import in_thread

_READ_BYTES = 1 << 18
_BATCH_S = 0.005
_TAIL_BYTES = 16 << 10
_IDLE_S = 0.25
_BUSY_S = 5.0
_PARTIAL_IDLE_S = 0.1
_PARTIAL_MAX_S = 0.5

_LINE_BYTES = 4096
"""A longer line of a helper counts as several."""

_MAX_NOTICES = 100
"""Lines of a helper that the launcher gets; the file has all."""


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
    _lost_lines: int = field(default=0, init=False)
    _is_within_line: bool = field(default=False, init=False)
    _console_lines: LineBuffer = field(default_factory=lambda: LineBuffer(wire.MAX_CHUNK_BYTES), init=False)
    _copy_lines: LineBuffer = field(default_factory=lambda: LineBuffer(wire.MAX_CHUNK_BYTES), init=False)

    def write(self, data: bytes) -> None:
        """Write ``data`` to the log file, then whole lines to the console."""
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
        if self.send:
            self._forward(self._console_lines.add(data))

    def partial_deadline(self) -> float | None:
        """When to flush the unfinished line (``time.monotonic()``); None without one."""
        return self._console_lines.deadline()

    def flush_partial(self) -> None:
        """Show an unfinished line: a prompt, a progress bar, the end of a stream."""
        self._forward(self._console_lines.take_rest())

    def _forward(self, data: bytes) -> None:
        for start in range(0, len(data), wire.MAX_CHUNK_BYTES):
            chunk = data[start : start + wire.MAX_CHUNK_BYTES]
            goes_on, self._is_within_line = self._is_within_line, not chunk.endswith(b"\n")
            header = replace(self.header, nbytes=len(chunk), lost_lines=self._lost_lines, goes_on=goes_on)
            if self.send and self.send(header, chunk):
                self._lost_lines = 0
            else:
                self._lost_lines += count_lines(header, chunk)

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


class Pump:
    """A daemon thread that reads one pipe into a Stream until its end."""

    def __init__(self, fd: int, stream: Stream, name: str) -> None:
        self.stream = stream
        self._fd = fd
        self._reads = 0
        self._thread = in_thread(name, self._run)

    def join(self, deadline: float) -> bool:
        """Wait for the end of the pipe until ``deadline`` (``time.monotonic()``); False if a process holds the pipe.

        While the pump still reads data, waits up to ``_BUSY_S`` more: on a busy machine the log file is complete, too.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        reads = -1
        while self._thread.is_alive() and reads != self._reads and time.monotonic() < deadline + _BUSY_S:
            reads = self._reads
            self._thread.join(_IDLE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._read_all()
        finally:  # After a bug, too: a worker must not wait for a reader that has gone.
            os.close(self._fd)
        self.stream.close()

    def _read_all(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while True:
            deadline = self.stream.partial_deadline()
            if deadline is not None and not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self.stream.flush_partial()
                continue
            data = os.read(self._fd, _READ_BYTES)
            if not data:
                return
            self._reads += 1
            self.stream.write(data)
            if len(data) < _READ_BYTES // 4:
                time.sleep(_BATCH_S)  # One wake-up for a burst of lines costs less than one per line.


def output_pipe() -> tuple[int, int]:
    """A large pipe for one stream: (the agent's end, the worker's end)."""
    reader, writer = os.pipe()
    enlarge_pipe(writer)
    return reader, writer


class HelperOutput:
    """What a helper of the agent writes: the process of the workers' store, or the member of the rendezvous.

    Mostly warnings of torch. They are no messages of ddplaunch: they go into a file of the run folder, and with -v they
    are shown under the helper's name. A daemon thread reads the pipe until its end. Main thread only.

    Attributes:
        fd: for the helper's stdout and stderr; whoever starts the helper closes it.
    """

    def __init__(self, title: str, file: Path | None, send: Callable[[Notice], None]) -> None:
        """``file`` is created at the first line, also if its folder has been moved; None: there is no file.

        ``send`` is called in the thread.

        Raises:
            RuntimeError: no room for a thread.
        """
        self._title, self._send = title, send
        self._last_line = ""
        reader, self.fd = os.pipe()
        movable = _movable(file)
        self._thread = in_thread(title, lambda: self._read_all(reader, movable))

    def last_line(self, timeout_s: float) -> str:
        """The last line of a helper that has ended; waits for at most ``timeout_s`` for the end of the pipe."""
        self._thread.join(timeout_s)
        return self._last_line

    def _read_all(self, reader: int, file: Path | None) -> None:
        log: LogFile | None = None
        with os.fdopen(reader, "rb") as stream:
            for number, line in enumerate(iter(lambda: stream.readline(_LINE_BYTES), b"")):
                if file:
                    log = log or LogFile(file, self._show)
                    log.write(line)
                self._last_line = line.decode("utf-8", "backslashreplace").rstrip("\n")
                if number < _MAX_NOTICES:
                    self._show(self._last_line)
        if log:
            log.close()
        if file:
            kept_files.close(int(file.parent.name))

    def _show(self, text: str) -> None:
        self._send(Notice(f"{self._title}: {text}", 1))


def _movable(file: Path | None) -> Path | None:
    """``file`` below a descriptor of its folder: the path stays right when the folder is moved."""
    if file:
        with contextlib.suppress(OSError):  # The disk is full, and the workers' logs have no folder either.
            file.parent.mkdir(exist_ok=True, mode=0o700)
            return Path(f"/proc/self/fd/{os.open(file.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}", file.name)
    return None
