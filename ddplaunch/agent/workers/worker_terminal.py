"""The terminal of a job's only worker: its output goes through pseudo-terminals, so that the log files have it, too.

The worker finds a terminal with the size of the user's. What it writes is shown at once, as it is; where the terminal
does not take it, the worker waits. stdout and stderr have a pseudo-terminal each: a log file each. Runs in the agent,
in the thread of the worker's pump; it opens them in the main thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import termios

from ddplaunch.agent.workers.output import Pipe, Stream
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import write_times

_MOST_BYTES = 1 << 20
_SIZE = bytes(8)


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
        """Write ``data`` to the terminal, however long that takes. A terminal that has gone takes nothing."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.terminal_fd, view) :]
        except OSError:  # The launcher gets SIGHUP.
            pass
        if lines := super().lines_for_console(data):
            super().show(lines)

    def flush_partial(self) -> None:
        """Send an unfinished line to the launcher; the terminal has it."""
        super().show(self._console_lines.take_rest())


class _PseudoTerminal(Pipe):
    """The agent's end of a pseudo-terminal. It is read without a pause: a person may be typing."""

    batch_s = 0.0

    def __init__(self, fd: int, stream: Stream, terminal_fd: int) -> None:
        super().__init__(fd, stream)
        self._terminal_fd, self._size, self._rest = terminal_fd, _SIZE, b""
        self._has_ended = False

    def _take(self) -> bytes:
        """All that there is. The begin of a mark is kept until the rest of it has come, or nothing more comes."""
        self._follow_size()
        parts = [self._rest]
        while sum(map(len, parts)) < _MOST_BYTES and (part := self._read()):
            parts.append(part)
        data = b"".join(parts)
        cut = write_times.begin_of_mark(data) if parts[1:] and not self._has_ended else len(data)
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
