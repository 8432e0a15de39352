"""The queue of events of one process: many threads post, only the main thread takes.

Used by launcher and agent. Posting must not block, and must be safe inside a signal handler.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ddplaunch.threads import in_thread

E = TypeVar("E")

NEVER = float("inf")
"""A deadline that does not come."""


class Mailbox(Generic[E]):
    """Events in the order they were posted; posting never blocks and is safe in a signal handler.

    ``queue.SimpleQueue`` is not used: up to Python 3.12 its ``get`` waits for ever if the timeout ends just after it
    took the queue's lock and found no item. ``queue.Queue`` deadlocks if a signal handler puts during a ``put``.

    Python runs signal handlers in the main thread only, but the kernel may deliver a signal to another thread, as it
    does after SIGCONT or for the second of two; such a delivery does not interrupt the main thread's wait.
    ``signal.set_wakeup_fd`` covers those signals too.
    """

    def __init__(self) -> None:
        self._events: deque[E] = deque()
        # Released by each post, acquired by the thread that waits: an acquisition means that it looks again.
        self._posted = threading.Lock()
        self._wakeup_fd: int | None = None

    def post(self, event: E) -> None:
        """Append an event. Any thread, also inside a signal handler."""
        self._events.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._posted.locked():
            with contextlib.suppress(RuntimeError):  # Another post has released it meanwhile.
                self._posted.release()

    @property
    def is_empty(self) -> bool:
        """Whether all posted events have been taken."""
        return not self._events

    def get(self, deadline: float = math.inf) -> E | None:
        """Wait for the next event; None after ``deadline`` (``time.monotonic()``). One thread only."""
        # To set the descriptor gives other threads the interpreter, which takes longer than an event under load.
        if self._events or threading.current_thread() is not threading.main_thread():
            return self._get(deadline)
        if self._wakeup_fd is None:
            self._wakeup_fd = self._open_wakeup_fd()
        before = signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
        try:
            return self._get(deadline)
        finally:
            signal.set_wakeup_fd(before)

    def take(self, is_wanted: Callable[[E], bool]) -> list[E]:
        """The events like this that wait, before all others. Only the thread that calls ``get`` may call it."""
        found: list[E] = []
        position = 0
        while position < len(self._events):
            if is_wanted(event := self._events[position]):
                found.append(event)
                del self._events[position]
            else:
                position += 1
        return found

    def _get(self, deadline: float) -> E | None:
        while not self._events:
            remaining_s = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
            if not self._posted.acquire(timeout=remaining_s):
                return None
        return self._events.popleft()

    def _open_wakeup_fd(self) -> int:
        """A descriptor for ``set_wakeup_fd``; closed with this mailbox, which ends the thread. -1 without resources."""
        try:
            reader, writer = os.pipe()
        except OSError:
            return -1
        os.set_blocking(writer, False)
        # The thread must not hold the mailbox itself, which would never be closed.
        wake = weakref.WeakMethod(self._wake)
        try:
            in_thread("signals", lambda: _forward_wakeups(reader, wake))
        except RuntimeError:
            os.close(reader)
            os.close(writer)
            return -1
        weakref.finalize(self, os.close, writer).atexit = False
        return writer


def _forward_wakeups(reader: int, wake: Callable[[], Callable[[], None] | None]) -> None:
    while os.read(reader, 64):
        if call := wake():
            call()
        del call
    os.close(reader)
