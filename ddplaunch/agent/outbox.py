"""Sends the agent's records and its workers' output to the launcher, through one bounded queue and one thread."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch import protocol
from ddplaunch.agent.lines import count_lines

if TYPE_CHECKING:
    from ddplaunch.records import Output

_PIPE_BYTES = 1 << 20
"""How far the writer of a pipe may be ahead of its reader; the most an unprivileged process may ask for (pipe(7))."""

_QUEUE_BYTES = 16 << 20
_FULL_WAIT_S = 0.1


class Outbox:
    """What goes to the launcher. Any thread may send; records overtake output, output over the limit is dropped."""

    def __init__(self, fd: int) -> None:
        widen(fd)
        self._fd = fd
        self._changed = threading.Condition()
        self._records: deque[bytes] = deque()
        self._output: deque[tuple[Output, bytes]] = deque()
        self._queued_bytes = 0
        self._written = 0
        self._writing = False
        self._stalled = False
        self._broken = False
        threading.Thread(target=self._write_all, name="outbox", daemon=True).start()

    def send(self, record: object) -> None:
        """Queue a record; never blocks."""
        with self._changed:
            self._records.append(protocol.encode(record))
            self._changed.notify_all()

    def send_output(self, header: Output, data: bytes) -> bool:
        """Queue output behind its header; False if the launcher does not keep up and it was dropped.

        Waits ``_FULL_WAIT_S`` once for a launcher that lags for a moment; not again until the queue has half emptied.
        A header without data, which only tells of lost lines, is always taken.
        """
        with self._changed:
            if self._queued_bytes > _QUEUE_BYTES and not self._stalled and data:
                self._stalled = not self._changed.wait_for(self._has_room, _FULL_WAIT_S)
            self._stalled = self._stalled and self._queued_bytes > _QUEUE_BYTES // 2
            if self._broken or (self._stalled and data):
                return False
            self._output.append((header, data))
            self._queued_bytes += len(data)
            self._changed.notify_all()
            return True

    def drain(self, stall_s: float) -> None:
        """Wait until all is written, but no longer than ``stall_s`` without progress and ten times that in all.

        Output that is still queued then is dropped and counted as lost, so that what follows comes after it.
        """
        limit = time.monotonic() + 10 * stall_s
        with self._changed:
            written = -1
            while not self._is_empty() and written != self._written and time.monotonic() < limit:
                written = self._written
                self._changed.wait_for(self._is_empty, stall_s)
            self._drop_output()

    def _drop_output(self) -> None:
        lost: dict[tuple[int, str], Output] = {}
        for header, data in self._output:
            key = (header.rank, header.stream)
            lines = header.lost_lines + count_lines(data) + (lost[key].lost_lines if key in lost else 0)
            lost[key] = replace(header, nbytes=0, lost_lines=lines)
        self._records.extend(protocol.encode(header) for header in lost.values())
        self._output.clear()
        self._queued_bytes = 0
        self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._queued_bytes <= _QUEUE_BYTES or self._broken

    def _is_empty(self) -> bool:
        return self._broken or not (self._records or self._output or self._writing)

    def _next(self) -> bytes:
        with self._changed:
            self._writing = False
            self._written += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._records or self._output)
            self._writing = True
            if self._records:
                return self._records.popleft()
            header, data = self._output.popleft()
            self._queued_bytes -= len(data)
            return protocol.encode(header) + data

    def _write_all(self) -> None:
        try:
            while True:
                write_fully(self._fd, self._next())
        except OSError:  # The launcher is gone; the end of stdin says so to the main thread.
            with self._changed:
                self._broken = True
                self._changed.notify_all()


def write_fully(fd: int, data: bytes) -> None:
    """``os.write`` until all is written; OSError as it comes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def widen(fd: int) -> None:
    """Give a pipe room for ``_PIPE_BYTES``; what is no pipe stays as it is."""
    with contextlib.suppress(OSError):  # Over the user's pipe quota it stays 64 KiB.
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
