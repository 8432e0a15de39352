"""One debug session: a process of a worker that has stopped in a debugger, and the pseudo-terminal that it gets.

Runs in the agent, in a thread of its own, which alone uses the connection and the terminal; orders of the launcher come
through a queue. The terminal is no process's controlling terminal, because its end would then kill the worker: Ctrl-C
becomes a signal here.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import os
import pty
import queue
import select
import signal
import socket
import struct
import termios
import time
from collections.abc import Callable

from ddplaunch.features.debug import records as debugging
from ddplaunch.features.debug.records import GiveTerminal, RefuseTerminal, SessionChanged, SessionOrder, TypeKeys
from ddplaunch.system import processes

Order = GiveTerminal | RefuseTerminal | TypeKeys | SessionOrder

_MOMENT_S = 1.0
"""A step of the script that takes longer is reported: another rank may need the terminal before it can end."""

_LEAVE_S = 1.0
_CTRL_C = b"\x03"


class DebugSession:
    """The session ``number`` of process ``pid``."""

    def __init__(self, number: int, connection: socket.socket, pid: int, send: Callable[[object], None]) -> None:
        """``send`` sends a record to the launcher; any thread calls it."""
        self.number = number
        self._connection, self._pid, self._send = connection, pid, send
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._poll = select.poll()
        self._terminal = -1
        self._pieces_left = debugging.MAX_PIECES
        self._running_since: float | None = None
        self._is_reported_running = False

    def handle(self, order: Order) -> None:
        """Queue an order of the launcher; any thread, before ``run`` has returned."""
        self._orders.put(order)
        with contextlib.suppress(BlockingIOError):  # So many wait that it is awake.
            os.write(self._waker, b"x")

    def run(self) -> None:
        """Serve the session until it ends; the only call in its thread."""
        for fd in (self._connection.fileno(), self._woken):
            self._poll.register(fd, select.POLLIN)
        word = b""
        with contextlib.suppress(OSError, termios.error):
            while not (word := self._serve(dict(self._poll.poll(self._timeout_ms())))):
                pass
        self._drain()
        self._send(SessionChanged(self.number, "quit" if word == debugging.QUITS else "over"))
        if word == debugging.GOES_ON:
            self._await_leave()

    def _await_leave(self) -> None:
        """What the script prints next must not come before the end of what the debugger has shown."""
        deadline, leave = time.monotonic() + _LEAVE_S, SessionOrder(self.number, "leave")
        with contextlib.suppress(queue.Empty):
            while self._orders.get(timeout=max(0.0, deadline - time.monotonic())) != leave:
                pass

    def close(self) -> None:
        """Close its descriptors; nothing may be called afterwards."""
        self._connection.close()
        for fd in (self._woken, self._waker, self._terminal):
            if fd >= 0:
                os.close(fd)

    def _timeout_ms(self) -> float | None:
        if self._running_since is None:
            return None
        return max(0.0, self._running_since + _MOMENT_S - time.monotonic()) * 1000

    def _serve(self, ready: dict[int, int]) -> bytes:
        """Do what is to be done; the last word of the worker if the session has ended.

        Raises:
            OSError: the worker has ended.
        """
        if not ready:
            self._report_running(is_running=True)
        if self._woken in ready:
            os.read(self._woken, 1)
            self._obey(self._orders.get())
        if self._terminal in ready:
            self._forward_output()
        return self._hear() if self._connection.fileno() in ready else b""

    def _hear(self) -> bytes:
        """The word that ends the session, if the worker has said it."""
        words = self._connection.recv(64)
        if not words:
            raise ConnectionError
        last = words[-1:]
        if last in (debugging.GOES_ON, debugging.QUITS):
            return last
        self._running_since = time.monotonic() if last == debugging.RUNS else None
        if last == debugging.STOPS:
            self._report_running(is_running=False)
        return b""

    def _report_running(self, *, is_running: bool) -> None:
        self._running_since = None
        if self._is_reported_running != is_running:
            self._is_reported_running = is_running
            self._send(SessionChanged(self.number, "running" if is_running else "stopped"))

    # The launcher's orders.

    def _obey(self, order: Order) -> None:
        match order:
            case GiveTerminal():
                self._give(order)
            case RefuseTerminal(reason=reason):
                self._connection.sendall(debugging.REFUSED + reason.encode("utf-8", "replace") + b"\n")
            case TypeKeys(data=data):
                self._type(_decoded(data))
            case SessionOrder(order="send"):
                self._pieces_left += 1
                if self._pieces_left == 1 and self._terminal >= 0:
                    self._poll.register(self._terminal, select.POLLIN)
            case SessionOrder():  # ``leave``.
                processes.signal_process(self._pid, signal.SIGTERM)

    def _give(self, order: GiveTerminal) -> None:
        if self._terminal >= 0:
            self._resize(order)
            processes.signal_process(self._pid, signal.SIGWINCH)
            return
        self._terminal, slave = pty.openpty()
        os.set_blocking(self._terminal, False)
        self._resize(order)
        self._poll.register(self._terminal, select.POLLIN)
        try:
            term = order.term.encode("utf-8", "replace")
            socket.send_fds(self._connection, [debugging.GIVEN + term + b"\n"], [slave])
        finally:
            os.close(slave)

    def _resize(self, order: GiveTerminal) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", order.rows, order.columns, 0, 0))

    def _type(self, keys: bytes) -> None:
        """Pass on ``keys``; Ctrl-C interrupts the process unless the debugger reads it as a key."""
        if self._terminal < 0:
            return
        if _CTRL_C in keys and termios.tcgetattr(self._terminal)[3] & termios.ISIG:
            keys = keys.rpartition(_CTRL_C)[2]
            processes.signal_process(self._pid, signal.SIGINT)
        with contextlib.suppress(BlockingIOError):  # The script does not read: as in a terminal, keys are lost.
            os.write(self._terminal, keys)

    # What the debugger shows.

    def _forward_output(self) -> None:
        try:
            data = os.read(self._terminal, debugging.PIECE_BYTES)
        except OSError as error:
            if error.errno == errno.EIO:  # Nobody has the terminal open: the process ends.
                self._poll.unregister(self._terminal)
            return
        self._send_output(data)
        self._pieces_left -= 1
        if not self._pieces_left:
            self._poll.unregister(self._terminal)

    def _drain(self) -> None:
        """Send what is left, as far as the launcher has room."""
        with contextlib.suppress(OSError):
            while self._terminal >= 0 and self._pieces_left > 0:
                self._send_output(os.read(self._terminal, debugging.PIECE_BYTES))
                self._pieces_left -= 1

    def _send_output(self, data: bytes) -> None:
        self._send(debugging.SessionOutput(self.number, base64.b64encode(data).decode("ascii")))


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data)
    except ValueError:
        return b""
