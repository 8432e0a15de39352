"""The queue of events of one process: many threads post, only the main thread takes.

Used by launcher and agent. Posting must not block, and must be safe inside a signal handler.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import threading
import time
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

E = TypeVar("E")


class _Wake:
    """Wakes the main thread, so that Python runs its signal handlers; never returned as an event."""


class Mailbox(Generic[E]):
    """Events in the order they were posted; posting never blocks and is safe in a signal handler.

    ``SimpleQueue.put`` is reentrant (documented), so a handler that interrupts a ``put`` of its thread does not
    deadlock, unlike with ``queue.Queue``.

    Python runs signal handlers in the main thread only, but the kernel may deliver a signal to another thread, as it
    does after SIGCONT or for the second of two; such a delivery does not interrupt the main thread's wait.
    ``signal.set_wakeup_fd`` covers those signals too.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[E | _Wake] = queue.SimpleQueue()
        self._wakeup_fd: int | None = None

    def post(self, event: E) -> None:
        """Append an event. Any thread, also inside a signal handler."""
        self._queue.put(event)

    @property
    def is_empty(self) -> bool:
        """Whether all posted events have been taken."""
        return self._queue.empty()

    def get(self, deadline: float = math.inf) -> E | None:
        """Wait for the next event; None after ``deadline`` (``time.monotonic()``). Main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return self._get(deadline)
        if self._wakeup_fd is None:
            self._wakeup_fd = self._open_wakeup_fd()
        before = signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        try:
            return self._get(deadline)
        finally:
            signal.set_wakeup_fd(before)

    def _get(self, deadline: float) -> E | None:
        while True:
            try:
                event = take(self._queue, deadline)
            except queue.Empty:
                return None
            if not isinstance(event, _Wake):
                return event

    def _open_wakeup_fd(self) -> int:
        """A descriptor for ``set_wakeup_fd``; closed with this mailbox, which ends the thread. -1 without resources."""
        try:
            reader, writer = os.pipe()
        except OSError:
            return -1
        os.set_blocking(writer, False)
        thread = threading.Thread(target=_wake, args=(reader, self._queue.put), name="signals", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            os.close(reader)
            os.close(writer)
            return -1
        weakref.finalize(self, os.close, writer).atexit = False
        return writer


def take(source: queue.SimpleQueue[E], deadline: float) -> E:
    """The next item of ``source``; no other thread may take from it.

    Before Python 3.12 ``SimpleQueue.get`` waits for ever if its timeout ends just after it took the queue's lock and
    found no item: with ``timeout=0`` sometimes in 3.10, with a few microseconds in all. So the first attempt, which
    takes the lock, does not wait.

    Raises:
        queue.Empty: no item until ``deadline`` (``time.monotonic()``).
    """
    with contextlib.suppress(queue.Empty):
        return source.get_nowait()
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise queue.Empty
    return source.get(timeout=None if remaining_s == math.inf else remaining_s)


def _wake(reader: int, put: Callable[[_Wake], None]) -> None:
    while os.read(reader, 64):
        put(_Wake())
    os.close(reader)
