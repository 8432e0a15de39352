"""The streams of an agent that stays connected over its login: AgentStream reads them, send_all sends.

Runs in the launcher, in threads of the host's handle.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import paramiko

BUFFER_BYTES = 1 << 16

_POLL_S = 1.0
"""Seconds between the checks for stderr, in the thread that reads stdout."""

_MAX_STDERR_LINE_BYTES = 4096


class AgentStream(io.RawIOBase):
    """An agent's stdout as a readable stream; the reading thread passes each line of stderr to ``on_stderr_line``."""

    def __init__(self, channel: paramiko.Channel, on_stderr_line: Callable[[str], object]) -> None:
        channel.settimeout(_POLL_S)
        self.on_stderr_line = on_stderr_line
        self._channel = channel
        self._half_line = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while True:
            try:
                data = self._channel.recv(len(buffer))
            except TimeoutError:
                self.read_stderr()
                continue
            self.read_stderr()
            buffer[: len(data)] = data
            return len(data)

    def read_stderr(self) -> None:
        """Read what has arrived of stderr. Unread output would block the agent: both streams share one window."""
        while self._channel.recv_stderr_ready() and (data := self._channel.recv_stderr(BUFFER_BYTES)):
            *lines, rest = (self._half_line + data).split(b"\n")
            for line in lines:
                self.on_stderr_line(line.decode("utf-8", "replace").rstrip())
            self._half_line = rest[-_MAX_STDERR_LINE_BYTES:]

    def exit_code(self, timeout_s: float) -> int | None:
        """Wait for the exit code, which arrives after the end of stdout; None after a signal."""
        self._channel.status_event.wait(max(0.0, timeout_s))
        self.read_stderr()
        code = self._channel.recv_exit_status() if self._channel.exit_status_ready() else -1
        return code if code >= 0 else None


def send_all(channel: paramiko.Channel, data: bytes) -> None:
    """Send to the remote process's stdin; blocks while the process does not read.

    Raises:
        OSError: the channel is closed.
    """
    while data:
        with contextlib.suppress(TimeoutError):  # The timeout set for reading does not apply to writing.
            sent = channel.send(data[:BUFFER_BYTES])
            if not sent:
                raise OSError("the channel is closed")
            data = data[sent:]
