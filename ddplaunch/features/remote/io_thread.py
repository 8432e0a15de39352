"""IoThread: one thread that serves many sockets and pipes; Connection: a socket that it serves; Lines: of a text.

Runs in the launcher, and in a node's relay. Nothing that the thread calls may block. What takes computing time is done
in between, so that what arrives meanwhile is read all the same.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    Work = Callable[[], object]

READ_BYTES = 64 << 10
_MAX_READS = 16
_MAX_LINE_BYTES = 64 << 10
_SLICE_S = 0.02
"""Seconds of computing between two looks at the descriptors."""


class IoThread:
    """Waits for descriptors and times, and calls what is due. All methods but ``call`` and ``close``: in the thread."""

    def __init__(self, name: str) -> None:
        """Start the thread.

        Raises:
            OSError, RuntimeError: no room for a descriptor or a thread.
        """
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Work] = deque()
        self._computing: deque[Work] = deque()
        self._timers: list[tuple[float, int, Work]] = []
        self._numbers = itertools.count()
        self._is_awake = self._is_closed = False
        self._alarm, self._bell = socket.socketpair()
        self._alarm.setblocking(False)
        self.watch(self._alarm, selectors.EVENT_READ, self._on_bell)
        self._thread = in_thread(name, self._run)

    def call(self, work: Work) -> None:
        """Have the thread call ``work``. Any thread; never blocks."""
        self._calls.append(work)
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(OSError):  # The thread has ended.
                self._bell.send(b".")

    def close(self) -> None:
        """End the thread; what it has not done yet is not done. Any other thread."""
        self.call(lambda: setattr(self, "_is_closed", True))
        self._thread.join()
        for each in (self._selector, self._alarm, self._bell):
            each.close()

    def compute(self, work: Work) -> None:
        """Call ``work``, which takes some time, when nothing else is to be done."""
        self._computing.append(work)

    def at(self, when: float, work: Work) -> None:
        """Call ``work`` at this ``time.monotonic()``."""
        heapq.heappush(self._timers, (when, next(self._numbers), work))

    def watch(self, descriptor: socket.socket | IO[bytes], events: int, work: Work) -> None:
        """Call ``work`` while there are such events, of ``selectors``; replaces an earlier call."""
        if descriptor in self._selector.get_map():
            self._selector.modify(descriptor, events, work)
        else:
            self._selector.register(descriptor, events, work)

    def forget(self, descriptor: socket.socket | IO[bytes]) -> None:
        """Undo ``watch``."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(self._timeout_s()):
                _safely(key.data)
            while self._timers and self._timers[0][0] <= time.monotonic():
                _safely(heapq.heappop(self._timers)[2])
            while self._calls:
                _safely(self._calls.popleft())
            until = time.monotonic() + _SLICE_S
            while self._computing and time.monotonic() < until:
                _safely(self._computing.popleft())

    def _timeout_s(self) -> float | None:
        if self._computing:
            return 0.0
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _on_bell(self) -> None:
        self._alarm.recv(1)
        self._is_awake = False  # Before the calls are taken: one that comes now rings again.


def _safely(work: Work) -> None:
    """An exception is a bug, as in any other thread; here it must not end what all nodes need."""
    try:
        work()
    except Exception:
        import traceback

        traceback.print_exc()


class Connection:
    """A connected socket: passes on what arrives, and sends without blocking. In the thread only.

    Attributes:
        on_data: called with what has arrived.
        on_closed: called once, when the other side has closed the connection, or it is broken.
        on_sent: called when all has been sent that had to wait for the other side.
    """

    def __init__(self, io: IoThread, sock: socket.socket, on_data: Callable[[bytes], object], on_closed: Work) -> None:
        sock.setblocking(False)
        self.on_data, self.on_closed = on_data, on_closed
        self.on_sent: Work = lambda: None
        self._io, self._socket = io, sock
        self._unsent = bytearray()
        self._ends = self._is_closed = self._is_held = False
        self._watched = 0
        self._watch()

    @property
    def is_held(self) -> bool:
        """Nothing is read for the time being."""
        return self._is_held

    @is_held.setter
    def is_held(self, is_held: bool) -> None:
        self._is_held = is_held
        self._watch()

    @property
    def waits(self) -> bool:
        """Whether something has to wait until the other side takes it."""
        return bool(self._unsent) and not self._is_closed

    def send(self, data: bytes) -> None:
        """Send, as soon as the other side takes it. To a connection that is closed nothing is sent."""
        self._unsent += data
        self._flush()

    def end(self) -> None:
        """Send no more: the other side reads the end behind what was sent."""
        self._ends = True
        self._flush()

    def read_rest(self) -> None:
        """Pass on what has arrived."""
        for _ in range(_MAX_READS):
            if self._is_closed or not self._read():
                return

    def close(self) -> None:
        """Close at once; ``on_closed`` is not called."""
        if not self._is_closed:
            self._is_closed = True
            self._io.forget(self._socket)
            self._socket.close()

    def _on_ready(self) -> None:
        if self._unsent:
            self._flush()
            if not self._unsent:
                self.on_sent()
        if not self._is_held and not self._is_closed:
            self._read()

    def _read(self) -> bool:
        """Whether something was there."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self.on_data(data)
        else:
            self.close()
            self.on_closed()
        return bool(data)

    def _flush(self) -> None:
        try:
            while self._unsent and not self._is_closed:
                del self._unsent[: self._socket.send(self._unsent)]
            if self._ends and not self._is_closed:
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:  # Broken: what has arrived before is read to its end.
            self._unsent.clear()
        self._watch()

    def _watch(self) -> None:
        events = (0 if self._is_held else selectors.EVENT_READ) | (selectors.EVENT_WRITE if self._unsent else 0)
        if self._is_closed or events == self._watched:
            return
        self._watched = events
        if events:
            self._io.watch(self._socket, events, self._on_ready)
        else:
            self._io.forget(self._socket)


class Lines:
    """Passes on the lines of a text that arrives in pieces; the end of a line that is too long."""

    def __init__(self, on_line: Callable[[str], object]) -> None:
        self._on_line, self._data = on_line, b""

    def add(self, data: bytes) -> None:
        """More of the text has arrived."""
        *lines, rest = (self._data + data).split(b"\n")
        self._data = rest[-_MAX_LINE_BYTES:]
        for line in lines:
            self._on_line(line.decode("utf-8", "surrogateescape").rstrip())
