"""Moves the workers' output: pipe -> log file -> Outbox. Never blocks a worker, never waits for one.

A pump thread per stream.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddplaunch import protocol
from ddplaunch.agent.lines import LineBuffer, count_lines, matching
from ddplaunch.pipes import widen
from ddplaunch.records import Output

if TYPE_CHECKING:
    from pathlib import Path

_READ_BYTES = 1 << 18
_GATHER_S = 0.005
_TAIL_BYTES = 16 << 10
_IDLE_S = 0.25
_BUSY_S = 5.0


class LogFile:
    """An append-only file that outlives a full disk: what cannot be written is counted and reported once."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self._path = path
        self._complain = complain
        self._complained = False
        self._fd = -1
        self._lost_bytes = 0
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            complain(f"{path}: {error.strerror}")

    def write(self, data: bytes) -> None:
        """Append ``data``; where there is room again, behind a line that says how much is missing."""
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
            if not self._complained:
                self._complained = True
                self._complain(f"{self._path}: {error.strerror}")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass
class Stream:
    """One stream of one worker: where its bytes go. Touched by its pump thread only, until ``Pump.join``.

    ``header`` is the Output record of this stream with no bytes yet; ``send`` None keeps it off the console.
    ``copy`` gets the lines that hold one of ``needles``, with ``copy_prefix`` in front. ``written_s`` is when the last
    bytes came (``time.monotonic()``); ``wake``, which any thread may set, is called at the next ones, once.
    """

    header: Output
    send: Callable[[Output, bytes], bool] | None
    log: LogFile | None
    needles: tuple[bytes, ...] = ()
    copy: LogFile | None = None
    copy_prefix: bytes = b""
    tail: bytes = b""
    written_s: float = 0.0
    wake: Callable[[], None] | None = None
    _lost_lines: int = field(default=0, init=False)
    _shown: LineBuffer = field(default_factory=lambda: LineBuffer(protocol.MAX_CHUNK_BYTES), init=False)
    _copied: LineBuffer = field(default_factory=lambda: LineBuffer(protocol.MAX_CHUNK_BYTES), init=False)

    def take(self, data: bytes) -> None:
        """Write what was read: the file first, then whole lines to the console."""
        self.written_s = time.monotonic()
        if self.wake:
            wake, self.wake = self.wake, None
            wake()
        if self.log:
            self.log.write(data)
        self.tail = (self.tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        if self.copy:
            self._copy_matches(self._copied.add(data))
        if self.send:
            self._forward(self._shown.add(data))

    def partial_deadline(self) -> float | None:
        """When the unfinished line has waited long enough (``time.monotonic()``); None without one."""
        return self._shown.deadline()

    def flush_partial(self) -> None:
        """Show an unfinished line: a prompt, a progress bar, the end of a stream."""
        self._forward(self._shown.take_rest())

    def _forward(self, data: bytes) -> None:
        for start in range(0, len(data), protocol.MAX_CHUNK_BYTES):
            chunk = data[start : start + protocol.MAX_CHUNK_BYTES]
            if self.send and self.send(replace(self.header, nbytes=len(chunk), lost_lines=self._lost_lines), chunk):
                self._lost_lines = 0
            else:
                self._lost_lines += count_lines(chunk)

    def _copy_matches(self, lines: bytes) -> None:
        found = matching(lines, self.needles, self.copy_prefix)
        if found and self.copy:
            self.copy.write(found)

    def close(self) -> None:
        """End of the stream: show what is pending and how much was never shown, close the file."""
        self.flush_partial()
        self._copy_matches(self._copied.take_rest())
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
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, deadline: float) -> bool:
        """Wait for the end of the pipe until ``deadline`` (``time.monotonic()``); False if something still holds it.

        A pump that is behind, on a busy machine, gets up to ``_BUSY_S`` more: its file shall be complete.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        reads = -1
        while self._thread.is_alive() and reads != self._reads and time.monotonic() < deadline + _BUSY_S:
            reads = self._reads
            self._thread.join(_IDLE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while True:
            deadline = self.stream.partial_deadline()
            if deadline is not None and not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self.stream.flush_partial()
                continue
            data = os.read(self._fd, _READ_BYTES)
            if not data:
                break
            self._reads += 1
            self.stream.take(data)
            if len(data) < _READ_BYTES // 4:
                time.sleep(_GATHER_S)  # Lines come in bursts: one wake-up for many costs less than one for each.
        os.close(self._fd)
        self.stream.close()


def output_pipe() -> tuple[int, int]:
    """A pipe for one stream: (our end, the worker's end)."""
    reader, writer = os.pipe()
    widen(writer)
    return reader, writer
