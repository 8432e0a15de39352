"""Sends the agent's records and its workers' output to the launcher, through one bounded queue and one thread."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch import protocol
from ddplaunch.agent.lines import count_lines
from ddplaunch.records import Output

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.logs import LogChunk

_QUEUE_BYTES = 16 << 20
_ENTRY_BYTES = 512
"""What an entry of the queue costs beside its bytes: millions of short ones must not pass for little."""

_FULL_WAIT_S = 0.1
_ATTEND_S = 0.1
_STEP_BYTES = 16 << 10

_PIECE_BYTES = 64 << 10
"""A record waits until what is being written is written: on a slow link, for half a second."""


class Outbox:
    """What goes to the launcher. Any thread may send; records overtake output, output over the limit is dropped."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._changed = threading.Condition()
        self._records: deque[bytes] = deque()
        self._output: deque[tuple[Output | LogChunk, bytes]] = deque()
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
            self._queue(header, data)
            return True

    def send_file(self, header: LogChunk, data: bytes) -> None:
        """Queue a piece of a file, as output; whoever sends them takes care that they do not become too many."""
        with self._changed:
            self._queue(header, data)

    def _queue(self, header: Output | LogChunk, data: bytes) -> None:
        self._output.append((header, data))
        self._queued_bytes += len(data) + _ENTRY_BYTES
        self._changed.notify_all()

    def drain(self, stall_s: float, attend: Callable[[], object] = lambda: None) -> None:
        """Wait until all is written, but no longer than ``stall_s`` without progress and ten times that in all.

        Output that is still queued then is dropped and counted as lost, so that what follows comes after it. ``attend``
        is called now and then meanwhile.
        """
        start = now = moved = time.monotonic()
        written = self._written
        while now < min(moved + stall_s, start + 10 * stall_s) and not self._is_written(_ATTEND_S):
            attend()
            now = time.monotonic()
            if written != self._written:
                written, moved = self._written, now
        with self._changed:
            self._drop_output()

    def _is_written(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(self._is_empty, timeout_s)

    def _drop_output(self) -> None:
        lost: dict[tuple[int, str], Output] = {}
        for header, data in self._output:
            if not isinstance(header, Output):
                continue
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
            header, data = self._next_piece()
            return protocol.encode(header) + data

    def _next_piece(self) -> tuple[Output | LogChunk, bytes]:
        """The next output, cut after a line if it is long: a record that comes meanwhile overtakes the rest."""
        header, data = self._output.popleft()
        self._queued_bytes -= len(data) + _ENTRY_BYTES
        cut = data.rfind(b"\n", 0, _PIECE_BYTES) + 1
        if len(data) <= _PIECE_BYTES or not cut or not isinstance(header, Output):
            return header, data
        self._output.appendleft((replace(header, nbytes=len(data) - cut, lost_lines=0), data[cut:]))
        self._queued_bytes += len(data) - cut + _ENTRY_BYTES
        return replace(header, nbytes=cut), data[:cut]

    def _write_all(self) -> None:
        try:
            while True:
                view = memoryview(self._next())
                while view:  # A pipe takes all or blocks: in small steps it is seen that it moves.
                    view = view[os.write(self._fd, view[:_STEP_BYTES]) :]
                    self._written += 1
        except OSError:  # The launcher is gone; the end of stdin says so to the main thread.
            with self._changed:
                self._broken = True
                self._changed.notify_all()
