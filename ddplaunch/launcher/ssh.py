"""A handle on an agent on another machine, over SSH: start it, send it records, deliver its.

paramiko is loaded when the first handle connects, and by nothing else: a local run never pays for it.
"""

from __future__ import annotations

import contextlib
import io
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from ddplaunch import protocol
from ddplaunch.launcher import remote
from ddplaunch.launcher.failures import NO_ROOM_HINT, HostFailure, Unreachable
from ddplaunch.launcher.handles import AgentConnected, AgentLost, complain, deliver
from ddplaunch.launcher.ssh_stream import BUFFER_BYTES, AgentStream, send_all, wait_for_facts
from ddplaunch.launcher.ssh_transport import Limit, drop
from ddplaunch.records import FROM_AGENT, Notice

if TYPE_CHECKING:
    from collections.abc import Callable

    import paramiko

    from ddplaunch.hosts import Host
    from ddplaunch.launcher.ssh_connections import Connections
    from ddplaunch.records import Output

_KEPT_LINES = 20
_SIGNAL_S = 3.0
_CODE_S = 1.0

_WINDOW_BYTES = 128 << 10
"""How much of an agent's output may be on the way. Answers come behind it: on a slow link, a second later."""


class SshHandle:
    """One agent on another machine.

    Posts AgentConnected, or a HostFailure and nothing more; then the agent's records; AgentLost when the channel has
    ended. It has three threads: it connects and sends in one, reads in another, paramiko decrypts in the third.
    """

    def __init__(
        self,
        host: Host,
        start: remote.RemoteStart,
        connections: Connections,
        post: Callable[[object], None],
        output: Callable[[Output, bytes], None],
    ) -> None:
        self.host = host
        self._start = start
        self._connections = connections
        self._post = post
        self._output = output
        self._outgoing: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._transport: paramiko.Transport | None = None
        self._stream: AgentStream | None = None
        self._pid = 0
        self._is_closed = False
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=f"to {host}", daemon=True).start()

    def send(self, record: object) -> None:
        """Queue a record, which never blocks; a channel that is gone is told of by AgentLost."""
        self._outgoing.put(record)

    def wake(self) -> None:
        """Continue an agent that somebody has stopped, over a second session."""
        self._signal("CONT", drops=False)

    def kill(self) -> None:
        """SIGKILL the agent if its node can be reached, and drop the connection in any case; returns at once."""
        self._signal("KILL", drops=True)

    def end_input(self) -> None:
        """Close the agent's stdin after what is queued: it stops its workers and ends. For many before ``close``."""
        self._outgoing.put(None)

    def close(self, timeout_s: float = 5.0) -> int | None:
        """End the agent's stdin, wait for its end and drop the connection; at once if it is not connected yet.

        Returns:
            The agent's exit code; None if it did not end in time, or nobody knows, as after a signal.
        """
        self._is_closed = True
        self.end_input()
        deadline = time.monotonic() + timeout_s
        code = None
        if self._stream and self._pid and self._ended.wait(timeout_s):
            code = self._stream.exit_code(deadline - time.monotonic())
        self._drop()
        return code

    # The thread that connects and sends.

    def _run(self) -> None:
        try:
            self._transport = self._connections.connect(self.host)
            if self._is_closed:
                raise Unreachable("start", "was not waited for")
            channel, reader = self._start_agent(self._transport)
            threading.Thread(target=self._listen, args=(reader,), name=f"from {self.host}", daemon=True).start()
        except Unreachable as error:
            self._fail(error)
        except RuntimeError as error:
            self._fail(Unreachable("start", f"this machine: {error}", NO_ROOM_HINT))
        except Exception as error:  # Whatever it is: the host is waited for, and nobody else would tell.
            self._fail(Unreachable("start", f"a bug in ddplaunch: {type(error).__name__}: {error}"))
        else:
            self._send_records(channel)

    def _fail(self, error: Unreachable) -> None:
        self._drop()
        self._post(HostFailure(str(self.host), error.cause, error.message, error.hint))

    def _start_agent(self, transport: paramiko.Transport) -> tuple[paramiko.Channel, io.BufferedReader[AgentStream]]:
        """Run the agent and wait for its answer.

        Raises:
            Unreachable: it does not start, or what it says of its node is not good enough.
        """
        limit = Limit(transport, time.monotonic() + self._connections.settings.start_timeout_s)
        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        try:
            with limit:
                channel = transport.open_session(window_size=_WINDOW_BYTES)
                channel.exec_command(remote.COMMAND)
                self._stream = stream = AgentStream(channel, lines.append)
                reader = io.BufferedReader(stream, BUFFER_BYTES)
                with contextlib.suppress(OSError):  # A login that is over already: what it said is to be read.
                    send_all(channel, remote.first_input(self._start))
                facts = wait_for_facts(reader, lines)
        except Exception as error:
            reason = _why_not_started(error, self._stream)
            raise self._not_started(limit.is_over, reason, lines) from None
        failure = remote.judge(str(self.host), facts, self._start)
        if failure:
            raise Unreachable(failure.cause, failure.message, failure.hint)
        self._pid = facts.pid
        stream.complain = lambda line: self._post(Notice(f"{self.host}: {line}"))
        self._post(AgentConnected(facts))
        return channel, reader

    def _not_started(self, is_over: bool, reason: str, lines: deque[str]) -> Unreachable:
        said = [line for line in lines if line]
        last = f"; its last words: {said[-1]}" if said else ""
        if is_over:
            timeout_s = self._connections.settings.start_timeout_s
            hint = "A slow file system or --remote-setup? `ssh HOST true` shows how long a login takes."
            return Unreachable("start", f"the agent did not start within {timeout_s:g} s{last}", hint)
        return Unreachable("start", reason + last, "Does `ssh HOST true` work?")

    def _send_records(self, channel: paramiko.Channel) -> None:
        with contextlib.suppress(OSError, EOFError):
            while (record := self._outgoing.get()) is not None:
                send_all(channel, protocol.encode(record))
            channel.shutdown_write()

    # The thread that reads.

    def _listen(self, reader: io.BufferedReader[AgentStream]) -> None:
        try:
            while (received := protocol.read_record(reader, FROM_AGENT)) is not None:
                deliver(*received, self._post, self._output)
        except (OSError, EOFError, protocol.ProtocolError) as error:
            complain(error, f"on {self.host}", self._post)
            self._drop()
        reader.raw.read_complaints()
        self._ended.set()
        self._post(AgentLost())

    # Any thread.

    def _drop(self) -> None:
        if self._transport:
            drop(self._transport)

    def _signal(self, name: str, *, drops: bool) -> None:
        """In a thread, since a connection that is cut takes its time."""

        def signal() -> None:
            transport = self._transport
            with contextlib.suppress(Exception):
                if transport and self._pid:
                    with Limit(transport, time.monotonic() + _SIGNAL_S) if drops else contextlib.nullcontext():
                        session = transport.open_session(timeout=_SIGNAL_S)
                        session.settimeout(_SIGNAL_S)
                        session.exec_command(f"kill -{name} {self._pid}")
                        session.recv(1)
            if drops:
                self._drop()

        threading.Thread(target=signal, name=f"signal {self.host}", daemon=True).start()


def _why_not_started(error: Exception, stream: AgentStream | None) -> str:
    if not isinstance(error, EOFError) or stream is None:
        return f"the login failed: {error}"
    code = stream.exit_code(_CODE_S)
    return f"the login ended {'' if code is None else f'with exit code {code} '}before the agent started"
