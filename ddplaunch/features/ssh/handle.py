"""SshTransport and SshHandle: start an agent on another machine over SSH, and exchange records with it.

Runs in the launcher. paramiko is imported when the first handle connects.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from collections import deque
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ddplaunch.errors import LaunchError
from ddplaunch.features.remote import remote_start
from ddplaunch.features.ssh.config import ConnectFailed
from ddplaunch.features.ssh.connections import MAX_LOGINS, Connections
from ddplaunch.features.ssh.session import close_now, transport_deadline
from ddplaunch.protocol import environment, wire
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.system import limits
from ddplaunch.system.limits import NO_ROOM_HINT
from ddplaunch.text import plural
from ddplaunch.threads import in_thread
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import AgentHandle, ChannelClosed, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    import paramiko

    from ddplaunch.cluster.hosts import Host
    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.remote.remote_start import RemoteStart
    from ddplaunch.transport.handle import Post, Purpose, WriteOutput

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


_KEPT_LINES = 20
_SIGNAL_TIMEOUT_S = 3.0
_EXIT_CODE_TIMEOUT_S = 1.0

_WINDOW_BYTES = 128 << 10
"""Bytes of an agent's output that may be in transit. On a slow link they delay the agent's answers by a second."""


class SshHandle(AgentHandle):
    """One agent on another machine.

    Posts AgentConnected and then the agent's records, or a HostFailure and no other event; ChannelClosed when the
    channel has closed. It has three threads: one connects and sends, one reads, and paramiko decrypts in the third.
    """

    def __init__(
        self, host: Host, start: RemoteStart, connections: Connections, post: Post, output: WriteOutput
    ) -> None:
        """Begin to connect to ``host``, in a thread.

        Raises:
            RuntimeError: no room for a thread.
        """
        super().__init__(f"on {host}", post, output)
        self.host = host
        self._start = start
        self._connections = connections
        self._transport: paramiko.Transport | None = None
        self._stream: AgentStream | None = None
        self._pid = 0
        self._is_connected = False
        self._is_closed = False
        self._ended = threading.Event()
        in_thread(f"to {host}", self._run)

    def wake(self) -> None:
        """Continue an agent that was stopped by a signal, over a second session."""
        self._signal("CONT", closes=False)

    def kill(self) -> None:
        """SIGKILL the agent, over a second session, and close the connection. Does not wait."""
        self._signal("KILL", closes=True)

    def close(self, timeout_s: float = 5.0) -> int | None:
        """Close the agent's stdin, wait for its exit if it is connected, and close the connection.

        Returns:
            The agent's exit code; None if it did not exit in time, or was ended by a signal.
        """
        self._is_closed = True
        self.end_input()
        deadline = time.monotonic() + timeout_s
        code = None
        if self._stream and self._is_connected and self._ended.wait(timeout_s):
            code = self._stream.exit_code(deadline - time.monotonic())
        self._close_now()
        return code

    # The thread that connects and sends.

    def _run(self) -> None:
        try:
            self._transport = self._connections.connect(self.host)
            if self._is_closed:
                raise ConnectFailed("start", "cancelled")
            channel, reader = self._start_agent(self._transport)
            in_thread(f"from {self.host}", lambda: self._receive(reader))
        except ConnectFailed as error:
            self._fail(error)
        except RuntimeError as error:
            self._fail(
                ConnectFailed("start", f"the launcher's machine has no room for a thread: {error}", NO_ROOM_HINT)
            )
        except Exception as error:  # Without an event of this host the launcher would wait forever.
            self._fail(ConnectFailed("start", f"a bug in ddplaunch: {type(error).__name__}: {error}"))
        else:
            self._send_records(channel)

    def _fail(self, error: ConnectFailed) -> None:
        self._close_now()
        self._post(HostFailure(str(self.host), error.cause, error.message, error.hint))

    def _start_agent(self, transport: paramiko.Transport) -> tuple[paramiko.Channel, io.BufferedReader[AgentStream]]:
        """Start the agent and wait for its facts.

        Raises:
            ConnectFailed: it does not start, or its node cannot take part.
        """
        deadline = time.monotonic() + self._start.timeout_s
        is_late = threading.Event()
        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        try:
            with transport_deadline(transport, deadline) as is_late:
                channel = transport.open_session(window_size=_WINDOW_BYTES)
                channel.exec_command(remote_start.COMMAND)
                self._stream = stream = AgentStream(channel, lines.append)
                reader = io.BufferedReader(stream, BUFFER_BYTES)
                with contextlib.suppress(OSError):  # The login has ended already; the failure contains its output.
                    send_all(channel, remote_start.first_input(self._start))
                facts = remote_start.wait_for_facts(reader, lines)
                if facts.failed:
                    stream.exit_code(_EXIT_CODE_TIMEOUT_S)  # Reads the rest of stderr, which has the reason.
        except Exception as error:
            reason = _start_failure(error, self._stream)
            raise self._not_started(is_late.is_set(), reason, lines) from None
        failure = remote_start.check_facts(str(self.host), facts, self._start, tuple(lines))
        if failure:
            raise ConnectFailed(failure.cause, failure.message, failure.hint)
        self._pid = facts.pid
        self._is_connected = True
        stream.on_stderr_line = lambda line: self._post(Notice(f"{self.host}: {line}"))
        self._post_connected(self.host, facts)
        return channel, reader

    def _not_started(self, is_late: bool, reason: str, lines: deque[str]) -> ConnectFailed:
        printed = [line for line in lines if line]
        last = f"; its last output: {printed[-1]}" if printed else ""
        if is_late:
            hint = f"{remote_start.SLOW_HINT} `ssh HOST true` shows how long a login takes."
            return ConnectFailed("start", f"the agent did not start within {self._start.timeout_s:g} s{last}", hint)
        return ConnectFailed("start", reason + last, "Does `ssh HOST true` work?")

    def _send_records(self, channel: paramiko.Channel) -> None:
        with contextlib.suppress(OSError, EOFError):
            while (record := self._outgoing.get()) is not None:
                send_all(channel, wire.encode(record))
            channel.shutdown_write()

    # The thread that reads.

    def _receive(self, reader: io.BufferedReader[AgentStream]) -> None:
        if not self._deliver_records(reader):
            self._close_now()
        reader.raw.read_stderr()
        self._ended.set()
        self._post(ChannelClosed())

    # Any thread.

    def _close_now(self) -> None:
        if self._transport:
            close_now(self._transport)

    def _signal(self, name: str, *, closes: bool) -> None:
        """Signal the agent over a second session, then close the connection if ``closes``.

        An agent without a pid or a node tag is not signalled: its stdin ends with the connection. In a thread, since a
        call over a cut connection blocks.
        """
        node_tag = self._start.env.get(environment.RUN_ID)

        def signal() -> None:
            transport = self._transport
            with contextlib.suppress(Exception):
                if transport and self._pid and node_tag:
                    deadline = time.monotonic() + _SIGNAL_TIMEOUT_S
                    with transport_deadline(transport, deadline) if closes else contextlib.nullcontext():
                        session = transport.open_session(timeout=_SIGNAL_TIMEOUT_S)
                        session.settimeout(_SIGNAL_TIMEOUT_S)
                        session.exec_command(remote_start.COMMAND)
                        session.sendall(remote_start.signal_input(name, self._pid, node_tag))
                        session.recv(1)
            if closes:
                self._close_now()

        in_thread(f"signal {self.host}", signal)


def _start_failure(error: Exception, stream: AgentStream | None) -> str:
    if not isinstance(error, EOFError) or stream is None:
        return f"the login failed: {error}"
    code = stream.exit_code(_EXIT_CODE_TIMEOUT_S)
    return f"the login ended {'' if code is None else f'with exit code {code} '}before the agent started"


class SshTransport(Transport):
    """Connects to hosts and starts agents there. A host that cannot be used is reported by a HostFailure."""

    def __init__(self, config: LaunchConfig, *others: Any) -> None:
        """Connect to no host yet.

        Raises:
            LaunchError: paramiko is not installed, or this machine allows too few open files for so many hosts.
        """
        if find_spec("paramiko") is None:
            raise LaunchError(
                "hosts are reached over SSH with the Python package paramiko, which is not installed",
                f"Run `{sys.executable} -m pip install paramiko`; a run without --hosts does not need it.",
            )
        super().__init__(config, *others)
        hosts = len(config.hosts)
        limits.raise_open_files(hosts + 4 * MAX_LOGINS + 64, plural(hosts, "host"))
        self._connections = Connections(config.remote)

    def _start_agent(self, index: int, post: Post, output: WriteOutput, purpose: Purpose) -> SshHandle:
        start = remote_start.agent_start(self._config, self._node_tag(index), purpose)
        return SshHandle(self._config.hosts[index], start, self._connections, post, output)

    @staticmethod
    def command(config: LaunchConfig, index: int) -> tuple[str, ...]:
        return (remote_start.COMMAND,)

    def close(self) -> None:
        """Close the connections to jump hosts."""
        self._connections.close()
