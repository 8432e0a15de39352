"""What goes over an SSH session's channel: a remote process's stdin, stdout and stderr."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

from ddplaunch.launcher.remote import MAX_ANSWER_BYTES, NodeFacts, read_facts

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    import paramiko

BUFFER_BYTES = 1 << 16

_LOOK_UP_S = 1.0
"""How often the thread that reads stdout looks for what came from stderr."""

_MAX_NOISE_BYTES = 1 << 20
_MAX_COMPLAINT_BYTES = 4096


class AgentStream(io.RawIOBase):
    """An agent's stdout to read from; each line of its stderr goes to ``complain``, in the thread that reads."""

    def __init__(self, channel: paramiko.Channel, complain: Callable[[str], object]) -> None:
        channel.settimeout(_LOOK_UP_S)
        self.complain = complain
        self._channel = channel
        self._half_line = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while True:
            try:
                data = self._channel.recv(len(buffer))
            except TimeoutError:
                self.read_complaints()
                continue
            self.read_complaints()
            buffer[: len(data)] = data
            return len(data)

    def read_complaints(self) -> None:
        """Left unread, they would stop the agent: both streams share one window."""
        while self._channel.recv_stderr_ready() and (data := self._channel.recv_stderr(BUFFER_BYTES)):
            *lines, rest = (self._half_line + data).split(b"\n")
            for line in lines:
                self.complain(line.decode("utf-8", "replace").rstrip())
            self._half_line = rest[-_MAX_COMPLAINT_BYTES:]

    def exit_code(self, timeout_s: float) -> int | None:
        """The process's exit code, which comes after the end of stdout; None without one, as after a signal."""
        self._channel.status_event.wait(max(0.0, timeout_s))
        self.read_complaints()
        code = self._channel.recv_exit_status() if self._channel.exit_status_ready() else -1
        return code if code >= 0 else None


def send_all(channel: paramiko.Channel, data: bytes) -> None:
    """Send to the remote process's stdin; blocks while it does not read.

    Raises:
        OSError: the channel is closed.
    """
    while data:
        with contextlib.suppress(TimeoutError):  # The limit is for those who read; who writes has all the time.
            sent = channel.send(data[:BUFFER_BYTES])
            if not sent:
                raise OSError("the channel is closed")
            data = data[sent:]


def wait_for_facts(reader: io.BufferedReader[AgentStream], lines: deque[str]) -> NodeFacts:
    """The remote side's answer; what login scripts print before it goes to ``lines``.

    Raises:
        EOFError: it ended without one.
        OSError: there is no end to what it prints.
    """
    nbytes = 0
    while line := reader.readline(MAX_ANSWER_BYTES):
        facts = read_facts(line)
        if facts:
            return facts
        nbytes += len(line)
        if nbytes > _MAX_NOISE_BYTES:
            raise OSError("it prints without end")
        lines.append(line.decode("utf-8", "replace").rstrip())
    raise EOFError
