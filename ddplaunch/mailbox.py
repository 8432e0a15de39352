"""The queue of events of one process: many threads post, the main thread alone takes."""

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
    """No event: the main thread shall come to itself, so that Python runs its signal handlers."""


class Mailbox(Generic[E]):
    """Events in the order they were posted; posting never blocks and is safe in a signal handler.

    ``SimpleQueue.put`` is reentrant (documented), so a handler that interrupts a ``put`` of the same thread does not
    deadlock, which ``queue.Queue`` would.

    Python runs signal handlers in the main thread only, and nothing interrupts that thread's wait when the kernel
    gives the signal to another one, as it does after SIGCONT or for the second of two. ``signal.set_wakeup_fd`` sees
    those too.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[E | _Wake] = queue.SimpleQueue()
        self._wakeup_fd: int | None = None

    def post(self, event: E) -> None:
        """Append an event; any thread, also inside a signal handler."""
        self._queue.put(event)

    @property
    def is_empty(self) -> bool:
        """Whether all that was posted has been taken."""
        return self._queue.empty()

    def get(self, deadline: float = math.inf) -> E | None:
        """Wait for the next event; main thread only. None once ``deadline`` (``time.monotonic()``) has passed."""
        if threading.current_thread() is not threading.main_thread():
            return self._get(deadline)
        if self._wakeup_fd is None:
            self._wakeup_fd = self._listen_for_signals()
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

    def _listen_for_signals(self) -> int:
        """A descriptor for ``set_wakeup_fd``; closed with this mailbox, which ends its thread. -1 without room."""
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
    """The next item of ``source``, of which this thread is the only taker.

    ``SimpleQueue.get`` waits for ever, until Python 3.12, where its time is over when it has just taken the queue's
    lock and found nothing: with ``timeout=0`` now and then in 3.10, with some microseconds in all. So the first look,
    which takes the lock, does not wait.

    Raises:
        queue.Empty: there is none until ``deadline`` (``time.monotonic()``).
    """
    with contextlib.suppress(queue.Empty):
        return source.get_nowait()
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise queue.Empty
    return source.get(timeout=None if left_s == math.inf else left_s)


def _wake(reader: int, put: Callable[[_Wake], None]) -> None:
    while os.read(reader, 64):
        put(_Wake())
    os.close(reader)
