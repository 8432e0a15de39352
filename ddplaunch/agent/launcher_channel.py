"""The agent's channel to its launcher: sends records and output, reads the launcher's records, detects missing pings.

Runs in the agent, in three daemon threads: ``outbox`` writes, ``launcher`` reads, ``pings`` measures the time between
pings. Received records become events in the agent's mailbox. Must not act on them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import BinaryIO

from ddplaunch import features
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import TO_AGENT, Notice, Output, Ping
from ddplaunch.protocol.output_runs import count_lost, runs_of
from ddplaunch.threads import in_thread

_QUEUE_BYTES = 16 << 20
_ENTRY_BYTES, _RUN_BYTES = 512, 40
"""Memory of a queue entry besides its data, so that the limit also holds for millions of short entries."""

_MAX_UNREAD = 8
_FULL_WAIT_S = 0.1
_DRAIN_STEP_S = 0.1
_WRITE_BYTES = 16 << 10

_PIECE_BYTES = 64 << 10
"""A record waits while one piece is written: half a second on a slow link."""


class Outbox:
    """Sends records and output to the launcher, by a queue and a thread. Any thread may call it.

    Records overtake output. Output above a limit is dropped and its lines are counted.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._changed = threading.Condition()
        self._records: deque[bytes] = deque()
        self._output: deque[tuple[wire.Chunk, bytes]] = deque()
        self._queued_bytes = 0
        self._written = 0
        self._writing = False
        self._stalled = False
        self._broken = False
        in_thread("outbox", self._write_all)

    def send(self, record: object) -> None:
        """Queue a record; never blocks."""
        with self._changed:
            self._records.append(wire.encode(record))
            self._changed.notify_all()

    def send_if_read(self, record: object) -> bool:
        """Queue a record that can wait; False, without queueing it, if the launcher does not read the earlier ones."""
        if len(self._records) >= _MAX_UNREAD:
            return False
        self.send(record)
        return True

    def send_output(self, header: Output, data: bytes) -> bool:
        """Queue output behind its header; False if it was dropped because the launcher reads too slowly.

        When the queue is full, waits for up to ``_FULL_WAIT_S``; the next wait is possible once half of the queue is
        written.
        A header without data, which only reports lost lines, is always queued.
        """
        with self._changed:
            if self._queued_bytes > _QUEUE_BYTES and not self._stalled and data:
                self._stalled = not self._changed.wait_for(self._has_room, _FULL_WAIT_S)
            self._stalled = self._stalled and self._queued_bytes > _QUEUE_BYTES // 2
            if self._broken or (self._stalled and data):
                return False
            self._queue(header, data)
            return True

    def send_file(self, header: wire.Chunk, data: bytes) -> None:
        """Queue a piece of a file; never blocks or drops it. The caller limits how many pieces are queued."""
        with self._changed:
            self._queue(header, data)

    def _queue(self, header: wire.Chunk, data: bytes) -> None:
        self._output.append((header, data))
        self._queued_bytes += _memory(header, data)
        self._changed.notify_all()

    def drain(self, stall_s: float, between: Callable[[], object] = lambda: None) -> None:
        """Wait until the queue is empty, for at most ``stall_s`` without progress and ``10 * stall_s`` in all.

        After that, drops output that is still queued, and queues the number of lost lines before any later record.
        Calls ``between`` about ten times a second.
        """
        start = now = moved = time.monotonic()
        written = self._written
        while now < min(moved + stall_s, start + 10 * stall_s) and not self.is_written(_DRAIN_STEP_S):
            between()
            now = time.monotonic()
            if written != self._written:
                written, moved = self._written, now
        with self._changed:
            self._drop_output()

    def is_written(self, timeout_s: float) -> bool:
        """Wait until the queue is empty, for at most ``timeout_s``; returns whether it was."""
        with self._changed:
            return self._changed.wait_for(self._is_empty, timeout_s)

    def _drop_output(self) -> None:
        lost: dict[tuple[int, str], Output] = {}
        queued = [(header, data) for header, data in self._output if isinstance(header, Output)]
        for header, data in (run for piece in queued for run in runs_of(*piece)):
            key = (header.rank, header.stream)
            lines = count_lost(header, data, lost[key].lost_lines if key in lost else 0)
            lost[key] = replace(header, nbytes=0, lost_lines=lines)
        self._records.extend(wire.encode(header) for header in lost.values())
        self._output.clear()
        self._queued_bytes = 0
        self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._queued_bytes <= _QUEUE_BYTES or self._broken

    def _is_empty(self) -> bool:
        return self._broken or not (self._records or self._output or self._writing)

    # The thread.

    def _write_all(self) -> None:
        try:
            while True:
                view = memoryview(self._next())
                while view:  # A pipe accepts a write or blocks: progress shows only in small writes.
                    view = view[os.write(self._fd, view[:_WRITE_BYTES]) :]
                    self._written += 1
        except OSError:  # The launcher has ended; the end of stdin reports that.
            pass
        except BaseException:  # A bug: the launcher must not wait for what nobody writes.
            os.close(self._fd)
            raise
        finally:
            with self._changed:
                self._broken = True
                self._changed.notify_all()

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
            return wire.encode(header) + data

    def _next_piece(self) -> tuple[wire.Chunk, bytes]:
        """The next output; a long one is cut after a line, so that a record can overtake the rest."""
        header, data = self._output.popleft()
        self._queued_bytes -= _memory(header, data)
        cut = data.rfind(b"\n", 0, _PIECE_BYTES) + 1
        if len(data) <= _PIECE_BYTES or not cut or not isinstance(header, Output) or header.runs:
            return header, data
        rest = replace(header, nbytes=len(data) - cut, lost_lines=0, goes_on=False), data[cut:]
        self._output.appendleft(rest)
        self._queued_bytes += _memory(*rest)
        return replace(header, nbytes=cut), data[:cut]


def _memory(header: wire.Chunk, data: bytes) -> int:
    """What a queued output takes, in bytes."""
    runs = len(header.runs) if isinstance(header, Output) else 0
    return len(data) + runs * _RUN_BYTES + _ENTRY_BYTES


class LauncherLost:
    """The agent's stdin has ended, or pings are missing: this agent must stop.

    The launcher has closed the stdin, or the launcher, its machine or the network has failed.
    """


class Inbox:
    """Posts the launcher's records, and LauncherLost at the end of the stream or of the pings.

    Only a launcher on another machine sends pings, because the loss of the network does not end the stream. An invalid
    record is reported to the launcher and ends the stream.

    Attributes:
        is_closed: set before LauncherLost is posted.
    """

    def __init__(self, stream: BinaryIO, mailbox: Mailbox[object], send: Callable[[object], None]) -> None:
        """Start the thread that reads ``stream``; nothing else may read it."""
        self.is_closed = threading.Event()
        self._stream, self._mailbox, self._send = stream, mailbox, send
        self._pings: Mailbox[float] | None = None
        in_thread("launcher", self._read_all)

    def _read_all(self) -> None:
        try:
            while (
                received := wire.read_record(self._stream, TO_AGENT, lambda: features.records("TO_AGENT"))
            ) is not None:
                record = received[0]
                if isinstance(record, Ping):
                    self._reset_timer(record.lost_after_s)
                self._mailbox.post(record)
        except (OSError, wire.CutOff):
            pass
        except wire.ProtocolError as error:
            self._send(Notice(f"the launcher sent an invalid record, so the agent stops its workers: {error}", -1))
        except Exception as error:  # A bug, or a file of the package that an upgrade has removed meanwhile.
            self._send(Notice(f"the agent stops its workers: {type(error).__name__}: {error}", -1))
        self._close()

    def _reset_timer(self, lost_after_s: float) -> None:
        if self._pings is None:
            self._pings = Mailbox()
            in_thread("pings", partial(self._time_pings, self._pings))
        self._pings.post(lost_after_s)

    def _time_pings(self, pings: Mailbox[float]) -> None:
        lost_after_s = pings.get()
        while lost_after_s is not None:
            lost_after_s = pings.get(time.monotonic() + lost_after_s)
        self._close()

    def _close(self) -> None:
        self.is_closed.set()
        self._mailbox.post(LauncherLost())
