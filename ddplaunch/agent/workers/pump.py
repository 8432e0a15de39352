"""Reads the pipes of a worker into its streams, in the order of writing.

Runs in the agent, with one thread per worker, which must not block for longer than the launcher needs to read.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import time
from bisect import bisect
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

from ddplaunch.agent.workers.output import BATCH_S, Piece, Pipe, Stream
from ddplaunch.threads import in_thread

_TOGETHER_BYTES = 60_000
"""One record with runs of both streams: less than a piece of ``launcher_channel``."""

_BURST_BYTES = 1 << 16
"""Less is gathered for ``BATCH_S``: one wake-up for a burst of lines costs less than one per line."""

_IDLE_S = 0.25
_BUSY_S, _LAST_S = 5.0, 30.0
_WAKE_S = 1.0

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
        self._is_idle = False  # The thread has sent on all that it has taken out of the pipes.
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

    def wait_until_sent(self, limit_s: float) -> None:
        """Wait until all that is in the pipes now has been sent on, but not longer than ``limit_s``. Any thread."""
        deadline = time.monotonic() + limit_s
        while self._thread.is_alive() and not self._is_all_sent() and time.monotonic() < deadline:
            time.sleep(BATCH_S)

    def _is_all_sent(self) -> bool:
        pipes, poll = self._pipes, select.poll()
        for pipe in pipes:
            poll.register(pipe.fd, select.POLLIN)
        # In this order: the thread is not idle from before it takes bytes until they are sent on.
        is_empty = not any(event & select.POLLIN for _, event in poll.poll(0))
        return is_empty and self._is_idle and all(pipe.stream.partial_deadline() is None for pipe in pipes)

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
        later: list[Piece] = []
        while self._pipes:
            self._is_idle = not later
            events = dict(poll.poll(0 if later else self._wait_ms()))
            self._is_idle = False
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
                self._is_idle = not later
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

    def _write(self, pieces: list[Piece]) -> None:
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
            stream.lose(data)
