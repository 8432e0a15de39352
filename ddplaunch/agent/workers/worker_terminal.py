"""The terminal of a job's only worker: its output goes through pseudo-terminals, so that the log files have it, too.

The worker finds a terminal with the size of the user's. What it writes is shown at once, as it is; where the terminal
does not take it, the worker waits, and what is left at its end goes to the launcher. stdout and stderr have a
pseudo-terminal each: a log file each. Runs in the agent, in the thread of the worker's pump; it opens them in the main
thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import termios
import time
from dataclasses import replace

from ddplaunch.agent.workers.output import Pipe, Stream
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import write_times

_MOST_BYTES = 1 << 20
_MARK_S = 1.0
"""Seconds in which a worker that has begun to write a mark goes on; else it was text of the script."""
_SIZE = bytes(8)
_TICK_S, _STALL_S = 0.1, 1.0
"""Seconds between two attempts to write to a stopped terminal, and until the launcher gets what is left at the end."""


def open_pair() -> tuple[int, int]:
    """A pseudo-terminal that changes no byte of the output: (the agent's end, the worker's end).

    Raises:
        OSError: there is none.
    """
    reader, writer = os.openpty()
    os.set_blocking(reader, False)
    modes = termios.tcgetattr(writer)
    modes[1] &= ~termios.OPOST  # The user's terminal does that. A worker knows by it whose terminal this is.
    termios.tcsetattr(writer, termios.TCSANOW, modes)
    return reader, writer


@dataclass
class TerminalStream(Stream):
    """A stream that is shown on the user's terminal by this process. The launcher gets its lines for console.log.

    Attributes:
        terminal_fd: of the user's terminal; the stream does not close it.
    """

    terminal_fd: int = -1

    def __post_init__(self) -> None:
        self._fd = _opened_again(self.terminal_fd)
        self._takes_more = True

    def opened(self, fd: int) -> Pipe:
        """The agent's end ``fd`` of the pseudo-terminal."""
        return _PseudoTerminal(fd, self, self.terminal_fd)

    def lines_for_console(self, data: bytes) -> bytes:
        """All of ``data``, at once: a prompt, and each key of an input line."""
        return data

    @property
    def is_between_lines(self) -> bool:
        """Never: each piece is shown by itself."""
        return False

    def show(self, data: bytes) -> None:
        """Show ``data`` on the terminal, or by the launcher if the terminal is stopped at the end of the worker."""
        count = self._write(data) if self._takes_more else 0
        if lines := super().lines_for_console(data[:count]):
            super().show(lines)
        if count < len(data):
            self.flush_partial()
            self._takes_more, self.header = False, replace(self.header, on_terminal=False)
            super().show(data[count:])

    def _write(self, data: bytes) -> int:
        """Write ``data`` to the terminal. Returns how much it took; a terminal that has gone takes all."""
        view, stops_at = memoryview(data), float("inf")
        while view:
            try:
                view = view[os.write(self._fd, view) :]
                stops_at = float("inf")
            except BlockingIOError:
                if self.is_over:
                    stops_at = min(stops_at, time.monotonic() + _STALL_S)
                if time.monotonic() >= stops_at:
                    break
                select.select([], [self._fd], [], _TICK_S)
            except OSError:  # The launcher gets SIGHUP.
                return len(data)
        return len(data) - len(view)

    def flush_partial(self) -> None:
        """Send an unfinished line to the launcher; the terminal has it."""
        super().show(self._console_lines.take_rest())

    def close(self) -> None:
        """As for every stream; it also closes its own descriptor of the terminal."""
        super().close()
        os.close(self._fd)


def _opened_again(terminal_fd: int) -> int:
    """A descriptor of the terminal that does not block, while other programs still find theirs as it was.

    If it cannot be opened, as after ``su``: another descriptor, which may block.
    """
    if os.isatty(terminal_fd):
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{terminal_fd}", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.dup(terminal_fd)


class _PseudoTerminal(Pipe):
    """The agent's end of a pseudo-terminal. It is read without a pause: a person may be typing."""

    batch_s = 0.0

    def __init__(self, fd: int, stream: Stream, terminal_fd: int) -> None:
        super().__init__(fd, stream)
        self._terminal_fd, self._size, self._rest = terminal_fd, _SIZE, b""
        self._has_ended = False
        self._read_at = 0.0

    def _take(self) -> bytes:
        """All that there is. The begin of a mark is kept until the rest of it has come, or for ``_MARK_S`` at most.

        A write to a terminal is not whole: its writer may lose the CPU within a mark.
        """
        self._follow_size()
        parts = [self._rest]
        while sum(map(len, parts)) < _MOST_BYTES and (part := self._read()):
            parts.append(part)
        data = b"".join(parts)
        now = time.monotonic()
        if parts[1:]:
            self._read_at = now
        is_due = self._has_ended or now > self._read_at + _MARK_S
        cut = len(data) if is_due else write_times.begin_of_mark(data)
        self._rest = data[cut:]
        return data[:cut]

    def _read(self) -> bytes:
        try:
            return os.read(self.fd, 1 << 16)
        except OSError as error:
            self._has_ended = error.errno == errno.EIO  # Else there is nothing now: EAGAIN.
            return b""

    def _follow_size(self) -> None:
        try:
            size = fcntl.ioctl(self._terminal_fd, termios.TIOCGWINSZ, _SIZE)
            if size != self._size:
                fcntl.ioctl(self.fd, termios.TIOCSWINSZ, size)
                self._size = size
        except OSError:  # The terminal has gone.
            pass
