"""SshTransport and SshHandle: start an agent on another machine over SSH, and exchange records with it.

Runs in the launcher. paramiko is imported when the first handle connects.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ddplaunch.errors import LaunchError
from ddplaunch.features.remote import remote_start
from ddplaunch.features.remote.call_back import CallBackHandle
from ddplaunch.features.remote.relay import CONTINUE, END_INPUT, EXITED, KILL, NO_CONNECTION
from ddplaunch.features.remote.start_limit import StartLimit
from ddplaunch.features.ssh.agent_stream import BUFFER_BYTES, AgentStream, send_all
from ddplaunch.features.ssh.config import ConnectFailed
from ddplaunch.features.ssh.connections import MAX_STARTS, Connections
from ddplaunch.features.ssh.listener import HINT, AgentListener
from ddplaunch.features.ssh.session import close_now, transport_deadline
from ddplaunch.protocol import environment, wire
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.system import limits
from ddplaunch.system.limits import NO_ROOM_HINT
from ddplaunch.text import plural
from ddplaunch.threads import in_thread
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import ChannelClosed, NodeFacts, Post, Purpose, Transport, WriteOutput

if TYPE_CHECKING:
    import paramiko

    from ddplaunch.cluster.hosts import Host
    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.remote.io_thread import Connection
    from ddplaunch.features.remote.remote_start import RemoteStart

_LISTENS_ABOVE = 16
"""Hosts: agents on more than so many connect to the launcher, since each login that is open takes three threads."""

_SIGNAL_TIMEOUT_S = 3.0
_EXIT_CODE_TIMEOUT_S = 1.0

_WINDOW_BYTES = 128 << 10
"""Bytes of an agent's output that may be in transit. On a slow link they delay the agent's answers by a second."""


class SshHandle(CallBackHandle):
    """One agent on another machine.

    Posts NodeFacts and then the agent's records, or a HostFailure and no other event; ChannelClosed when the
    channel has closed. An agent that has connected to the launcher has no thread of its own here. Others have three:
    one sends, one reads, and paramiko decrypts in the third.
    """

    def __init__(
        self,
        host: Host,
        start: RemoteStart,
        connections: Connections,
        post: Post,
        output: WriteOutput,
        given: Callable[[], bytes] = bytes,
        on_not_connected: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Have a thread of ``connections`` connect to ``host``.

        ``given`` returns what an agent needs that is to connect to the launcher, and is asked at the login;
        ``on_not_connected`` is called with the reason if it stays connected over SSH. Both: in any thread.

        Raises:
            RuntimeError: no room for a thread.
        """
        super().__init__(connections.io, str(host), start, post, output)
        self._given, self._on_not_connected = given, on_not_connected
        self._connections = connections
        self._login: paramiko.Transport | None = None
        self._stream: AgentStream | None = None
        """The agent's stdout, if its channel is the login."""
        self._has_connected = False
        self._pid = 0
        self._exit_code: int | None = None
        self._is_closed = False
        connections.in_pool(lambda: self._connect(host))

    def wake(self) -> None:
        """Continue an agent that was stopped by a signal, over a second session if there is no relay."""
        if self._stream:
            self._signal("CONT", closes=False)
        else:
            self._io.call(lambda: self._order(CONTINUE))

    def kill(self) -> None:
        """SIGKILL the agent, over a second session if there is no relay, and close the connection. Does not wait."""
        if self._stream:
            self._signal("KILL", closes=True)
            return
        self._io.call(lambda: self._order(KILL))
        super().kill()

    def close(self, timeout_s: float = 5.0) -> int | None:
        """Close the agent's stdin, wait for its exit if it is connected, and close the connection.

        Returns:
            The agent's exit code; None if it did not exit in time, or was ended by a signal.
        """
        self._is_closed = True
        self.end_input()
        deadline = time.monotonic() + timeout_s
        has_ended = self.is_connected and self._ended.wait(timeout_s)
        if self._stream and has_ended:
            self._exit_code = self._stream.exit_code(deadline - time.monotonic())
        if not self._stream and not has_ended:
            self.kill()
        self._close_login()
        return self._exit_code

    # A thread of the pool.

    def _connect(self, host: Host) -> None:
        try:
            if self._is_closed:
                raise ConnectFailed("start", "cancelled")
            self._login = self._connections.connect(host)
            if self._is_closed:
                raise ConnectFailed("start", "cancelled")
            self._start_agent(self._login)
        except ConnectFailed as error:
            self._fail(error)
        except RuntimeError as error:
            self._fail(
                ConnectFailed("start", f"the launcher's machine has no room for a thread: {error}", NO_ROOM_HINT)
            )
        except Exception as error:  # Without an event of this host the launcher would wait forever.
            self._fail(ConnectFailed("start", f"a bug in ddplaunch: {type(error).__name__}: {error}"))

    def _fail(self, error: ConnectFailed) -> None:
        self._close_login()
        failure = HostFailure(self.host, error.cause, error.message, error.hint)
        self._io.call(lambda: self.on_failed(failure))

    def _start_agent(self, login: paramiko.Transport) -> None:
        """Start the agent and wait for its facts, or until it has connected to the launcher.

        Raises:
            ConnectFailed: it does not start, or its node cannot take part.
        """
        self.limit, is_late = StartLimit(self.start.timeout_s), threading.Event()
        stream: AgentStream | None = None
        try:
            with transport_deadline(self._io, login, lambda: self.limit.due) as is_late:
                channel = login.open_session(window_size=_WINDOW_BYTES)
                channel.exec_command(remote_start.COMMAND)
                stream = AgentStream(channel, self._printed.append)
                reader = io.BufferedReader(stream, BUFFER_BYTES)
                with contextlib.suppress(OSError):  # The login has ended already; the failure contains its output.
                    send_all(channel, remote_start.first_input(self.start) + self._given())
                give = functools.partial(self._give_piece, channel)
                facts = remote_start.wait_for_facts(reader, self._printed, give)
                if facts.failed:
                    stream.exit_code(_EXIT_CODE_TIMEOUT_S)  # Reads the rest of stderr, which has the reason.
        except Exception as error:
            reason = _start_failure(error, stream)
            raise self._not_started(is_late.is_set(), reason) from None
        if facts.has_connected:
            self._close_login()
            self._io.call(lambda: self._on_connected(self.limit.due))
            return
        failure = remote_start.check_facts(self.host, facts, self.start, tuple(self._printed))
        if failure:
            raise ConnectFailed(failure.cause, failure.message, failure.hint)
        if facts.not_connected:
            self._on_not_connected(f"{self.host}: {remote_start.last_words(facts.not_connected)}")
        self._serve_over(channel, stream, reader, facts)

    def _give_piece(self, channel: paramiko.Channel, data: bytes) -> None:
        send_all(channel, data)
        self.limit.restart()

    def _serve_over(
        self, channel: paramiko.Channel, stream: AgentStream, reader: io.BufferedReader[AgentStream], facts: NodeFacts
    ) -> None:
        """Raises RuntimeError: no room for two threads."""
        self._pid, self._stream = facts.pid, stream
        stream.on_stderr_line = lambda line: self._post(Notice(f"{self.host}: {line}"))
        in_thread(f"to {self.host}", lambda: self._send_records(channel))
        in_thread(f"from {self.host}", lambda: self._receive(reader, facts))

    # The thread of ``io``. The login decides whether it serves the agent: a node that has waited too long for the
    # launcher's answer has given up a connection that may arrive here all the same.

    def on_records_connected(self, connection: Connection) -> None:
        if self._stream:
            connection.close()
        else:
            super().on_records_connected(connection)

    def _on_closed(self) -> None:
        if self._stream:
            return
        if self.is_connected or self._has_connected:
            super()._on_closed()
        else:
            self._records = None

    def _send_queued(self) -> None:
        if not self._stream:
            super()._send_queued()

    def _on_connected(self, deadline: float) -> None:
        """The agent has connected, and its login has ended."""
        self._has_connected = True
        if self._records:
            self._io.at(deadline, self._on_late)
        else:
            super()._on_closed()

    def _on_late(self) -> None:
        """The agent has had its time to start, also if it has connected."""
        self.on_failed(self.not_started("the node", within_s=self.start.timeout_s))

    def _on_error_line(self, line: str) -> None:
        if line.startswith(EXITED):
            code = line.removeprefix(EXITED)
            self._exit_code = int(code) if re.fullmatch("[0-9]{1,3}", code) else None
        else:
            super()._on_error_line(line)

    def _order(self, order: str) -> None:
        if self._errors:
            self._errors.send(f"{order}\n".encode())

    def _end_of_input(self, _records: Connection) -> None:
        self._order(f"{END_INPUT} {self._sent_bytes}")

    def _not_started(self, is_late: bool, reason: str) -> ConnectFailed:
        printed = [line for line in self._printed if line]
        last = f"; its last output: {printed[-1]}" if printed else ""
        if is_late:
            hint = f"{remote_start.SLOW_HINT} `ssh HOST true` shows how long a login takes."
            return ConnectFailed("start", f"the agent did not start within {self.start.timeout_s:g} s{last}", hint)
        return ConnectFailed("start", reason + last, "Does `ssh HOST true` work?")

    def _send_records(self, channel: paramiko.Channel) -> None:
        with contextlib.suppress(OSError, EOFError):
            while (record := self._outgoing.get()) is not None:
                send_all(channel, wire.encode(record))
            channel.shutdown_write()

    # The thread that reads.

    def _receive(self, reader: io.BufferedReader[AgentStream], facts: NodeFacts) -> None:
        self.is_connected = True
        self._post_connected(self.host, facts)
        if not self._deliver_records(reader):
            self._close_login()
        reader.raw.read_stderr()
        self._ended.set()
        self._post(ChannelClosed())

    # Any thread.

    def _close_login(self) -> None:
        if self._login:
            close_now(self._login)

    def _signal(self, name: str, *, closes: bool) -> None:
        """Signal the agent over a second session, then close the connection if ``closes``.

        An agent without a pid or a node tag is not signalled: its stdin ends with the connection. In a thread, since a
        call over a cut connection blocks.
        """
        node_tag = self.start.env.get(environment.RUN_ID)

        def signal() -> None:
            login = self._login
            with contextlib.suppress(Exception):
                if login and self._pid and node_tag:
                    deadline = time.monotonic() + _SIGNAL_TIMEOUT_S
                    with transport_deadline(self._io, login, lambda: deadline) if closes else contextlib.nullcontext():
                        session = login.open_session(timeout=_SIGNAL_TIMEOUT_S)
                        session.settimeout(_SIGNAL_TIMEOUT_S)
                        session.exec_command(remote_start.COMMAND)
                        session.sendall(remote_start.signal_input(name, self._pid, node_tag))
                        session.recv(1)
            if closes:
                self._close_login()

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
        limits.raise_open_files(2 * hosts + 4 * min(hosts, MAX_STARTS) + 64, plural(hosts, "host"))
        try:
            self._connections = Connections(config.remote)
        except (OSError, RuntimeError) as error:
            raise LaunchError(f"the launcher cannot start: {error}", NO_ROOM_HINT) from None
        self._listener = AgentListener(self._connections.io, config) if hosts > _LISTENS_ABOVE else None

    def _start_agent(self, index: int, post: Post, output: WriteOutput, purpose: Purpose) -> SshHandle:
        start = remote_start.agent_start(self._config, index, self._node_tag(index), purpose)
        host = self._config.hosts[index]
        if not self._listener or purpose == "sweep":  # A sweep would end its own relay, too.
            return SshHandle(host, start, self._connections, post, output)
        start = replace(start, connects=True)
        given = functools.partial(self._listener.given, str(index))
        tell = functools.partial(self._on_not_connected, post, self._listener)
        handle = SshHandle(host, start, self._connections, post, output, given, tell)
        self._listener.expect(str(index), handle)
        return handle

    @staticmethod
    def _on_not_connected(post: Post, listener: AgentListener, reason: str) -> None:
        """Say it of the first node only. In any thread."""
        is_unreachable = NO_CONNECTION in reason
        listener.some_cannot_connect = listener.some_cannot_connect or is_unreachable
        if not listener.has_told:
            listener.has_told = True
            hint = f" {HINT}" if is_unreachable else ""
            post(Notice(f"{reason}. Such nodes stay connected over SSH, each by three threads here.{hint}"))

    @staticmethod
    def command(config: LaunchConfig, index: int) -> tuple[str, ...]:
        return (remote_start.COMMAND,)

    def close(self) -> None:
        """Close the connections to jump hosts."""
        self._connections.close()
        if self._listener:
            self._listener.close()
