"""Agents that connect to the launcher: CallBackServer listens for them, and CallBackHandle is one of them.

Runs in the launcher. One IoThread serves the listener and all connections; a node runs ``caller``. Both sides prove by
challenge and response that they know the secret of the run: each sends a random text, and answers with a digest of both
texts, of its own role, and of what the connection is for. In a SLURM job nothing is encrypted. The nodes that were
reached over SSH run ``relay``: their connections are encrypted, and prove by that whom they have reached.

Whoever reaches the port may connect. A connection that has proved nothing is closed after ``_STRANGER_S`` or
``_MAX_HELLO_BYTES``, and the oldest of them where they are too many: a node tries again.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError
from ddplaunch.features.remote import caller, package, remote_start
from ddplaunch.features.remote.arrivals import Arrivals
from ddplaunch.features.remote.io_thread import READ_BYTES, Connection, IoThread, Lines
from ddplaunch.features.remote.relay import ERRORS, RECORDS, proof
from ddplaunch.features.remote.start_limit import StartLimit
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.system import network
from ddplaunch.transport.handle import AgentHandle, ChannelClosed, NodeFacts, Post, WriteOutput, late_types

if TYPE_CHECKING:
    import socket
    import ssl

    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.remote.remote_start import RemoteStart
    from ddplaunch.transport.failures import HostFailure

_STRANGER_S = 10.0
_MAX_HELLO_BYTES = 1024
_MAX_STRANGERS = 256
_ACCEPTED_AT_ONCE = 64
_PAUSE_S = 0.2
"""Without room for another descriptor, nothing is accepted for so long."""

_DECODE_S = 0.01
"""Records of one agent are decoded for so long before it is another one's turn."""

_KEPT_LINES = 20
_LAST_WORDS_S = 0.2


class CallBackHandle(AgentHandle):
    """One agent that connects to the launcher; the thread of ``io`` calls all methods that begin with ``on_``.

    Posts NodeFacts, the agent's records and ChannelClosed, or a HostFailure and no other event.

    Attributes:
        start: how the agent is started.
        is_connected: its facts have arrived.
        is_over: it has ended, or cannot be started, or is given up.
        was_ended: this side has ended it: it may still run.
        limit: until when it must be connected.
        on_change: called when one of these has changed.
    """

    def __init__(self, io: IoThread, host: str, start: RemoteStart, post: Post, output: WriteOutput) -> None:
        super().__init__(f"on {host}", post, output)
        self.host, self.start = host, start
        self.is_connected = self.is_over = self.was_ended = False
        self.on_change: Callable[[], object] = lambda: None
        self._io = io
        self._records: Connection | None = None
        self._errors: Connection | None = None
        self._arrivals = Arrivals(self.accepted, late_types)
        self._start_data = b""
        self._printed: deque[str] = deque(maxlen=_KEPT_LINES)
        self._answered: set[str] = set()
        self.limit = StartLimit(start.timeout_s)
        self._is_cut_off = False
        self._sent_bytes = 0
        self._ended = threading.Event()

    # The main thread.

    def send(self, record: object) -> None:
        super().send(record)
        self._io.call(self._send_queued)

    def end_input(self) -> None:
        super().end_input()
        self._io.call(self._send_queued)

    def wake(self) -> None:
        """Do nothing: only a signal could wake it."""

    def kill(self) -> None:
        """Close the connection: the agent stops its workers, and exits."""
        self._io.call(self.on_given_up)

    def close(self, timeout_s: float = 5.0) -> int | None:
        """Close the agent's stdin and wait for its end, if it is connected, with ``kill`` after ``timeout_s``.

        Returns:
            None: the exit code is not known here.
        """
        self.end_input()
        if self.is_connected:
            self._ended.wait(timeout_s)
        self.kill()
        return None

    # The start.

    def on_printed(self, line: str) -> None:
        """The node has printed this before it has connected, or what runs the command there afterwards."""
        facts = None if self.is_connected else remote_start.read_facts(line.encode("utf-8", "surrogateescape"))
        if facts:
            self._on_facts(facts)
        else:
            self._on_error_line(line)

    def _on_error_line(self, line: str) -> None:
        if self.is_connected:
            self.on_said(f"{self.host}: {line}")
        else:
            self._printed.append(line)

    def on_errors_connected(self, connection: Connection) -> None:
        """The agent's stderr is connected."""
        if self._errors:
            self._errors.close()
        self._errors = connection
        connection.on_data = Lines(self._on_error_line).add
        connection.on_closed = lambda: None

    def on_records_connected(self, connection: Connection) -> None:
        """The agent's stdin and stdout are connected; its facts come next."""
        self._records = connection
        connection.on_data, connection.on_closed = self._on_start_data, self._on_closed

    def _on_start_data(self, data: bytes) -> None:
        self._start_data += data
        while b"\n" in self._start_data and not (self.is_connected or self.is_over):
            line, _, self._start_data = self._start_data.partition(b"\n")
            if line.startswith(package.PREFIX):
                self.limit.restart()
                if answer := package.answer(line, self._answered):
                    self._give(memoryview(answer))
            else:
                self.on_printed(line.decode("utf-8", "surrogateescape").rstrip())
        if self.is_connected:
            self._on_data(self._start_data)
        self._start_data = self._start_data[-remote_start.MAX_ANSWER_BYTES :]

    def _give(self, data: memoryview) -> None:
        """Send as fast as the node takes it: with a thousand nodes, no copy for each is in memory."""
        records = self._records
        while records and data and not records.waits:
            records.send(bytes(data[:READ_BYTES]))
            data = data[READ_BYTES:]
            self.limit.restart()
        if records:
            records.on_sent = lambda: self._give(data)

    def _on_facts(self, facts: NodeFacts) -> None:
        failure = remote_start.check_facts(self.host, facts, self.start, tuple(self._printed))
        if failure or not self._records:
            self.on_failed(failure or self.not_started("the launcher"))
            return
        self.is_connected = True
        self._records.on_data = self._on_data
        self._post_connected(self.host, facts)
        self._send_queued()
        self.on_change()

    def not_started(self, command: str, printed: Sequence[str] = (), within_s: float | None = None) -> HostFailure:
        """The failure if ``command``, which has ``printed`` this, has not started the agent."""
        return remote_start.not_started(self.host, command, [*self._printed, *printed], within_s)

    def on_said(self, line: str) -> None:
        """Show what the command that has started the agent, and others, says."""
        self._post(Notice(line))

    def on_failed(self, failure: HostFailure) -> None:
        """The agent cannot be started."""
        if not self.is_over and not self.is_connected:
            self._post(failure)
            self._end()

    # The end.

    def on_given_up(self) -> None:
        """Close the connection, or do not wait for it any longer."""
        if not self.is_over:
            self.was_ended = True
            self._end()
            if self.is_connected:
                self._post(ChannelClosed())

    def _on_closed(self) -> None:
        if not self.is_connected:  # What it has said on stderr may come a moment later.
            self._io.at(time.monotonic() + _LAST_WORDS_S, lambda: self.on_failed(self.not_started("the node")))
            return
        self._is_cut_off = True
        self._io.compute(self._decode)

    def _end(self) -> None:
        if self._errors:  # The agent has written its last words before it has ended.
            self._errors.read_rest()
        self.is_over = True
        for connection in (self._records, self._errors):
            if connection:
                connection.close()
        self._ended.set()
        self.on_change()

    # Records.

    def _send_queued(self) -> None:
        if not self.is_connected or self._records is None:
            return
        while not self._outgoing.empty():
            record = self._outgoing.get()
            if record is None:
                self._end_of_input(self._records)
            else:
                data = wire.encode(record)
                self._sent_bytes += len(data)
                self._records.send(data)

    def _end_of_input(self, records: Connection) -> None:
        records.end()

    def _on_data(self, data: bytes) -> None:
        self._arrivals.add(data)
        if self._records and not self._records.is_held:
            self._records.is_held, self.heard_at = True, math.inf
            self._io.compute(self._decode)

    def _decode(self) -> None:
        """Decode what has arrived. Until then nothing more is read of this agent: it waits, and not the others."""
        until = time.monotonic() + _DECODE_S
        try:
            while not self.is_over and (received := self._arrivals.take()) is not None:
                self._deliver(*received)
                if time.monotonic() > until:
                    self._io.compute(self._decode)
                    return
        except Exception as error:
            self._report(error)
            self.on_given_up()
            return
        self.heard_at = time.monotonic()
        if self._records:
            self._records.is_held = False
        if self._is_cut_off and not self.is_over:
            self._end()
            self._post(ChannelClosed())


class CallBackServer:
    """Listens for the agents of a run, and gives each of their connections to its handle. In the thread of ``io``.

    Attributes:
        secret: what the nodes must know.
        port: where it listens.
        has_let_in: an agent has connected.
    """

    def __init__(self, io: IoThread, listener: socket.socket, context: ssl.SSLContext | None = None) -> None:
        """Listen at ``listener``, which it closes in the end; ``context`` encrypts. Called by the main thread."""
        self.secret = os.urandom(32).hex()
        self.port = int(listener.getsockname()[1])
        self._io, self._listener, self._context = io, listener, context
        self._expected: dict[str, CallBackHandle] = {}
        self._strangers: dict[_Stranger, float] = {}
        """In the order in which they have come, each with its time limit."""
        self._is_timing = self.has_let_in = False
        listener.setblocking(False)
        io.call(self._listen)

    def expect(self, name: str, handle: CallBackHandle) -> None:
        """The node with this name may connect for ``handle``, once; replaces an earlier call."""
        self._expected[name] = handle

    def close(self) -> None:
        """Listen no more. Called by the main thread, when the IoThread has ended."""
        self._listener.close()
        for stranger in self._strangers:
            stranger.connection.close()

    def _listen(self) -> None:
        self._io.watch(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # No descriptor is free, or the other side has gone already.
                self._drop_oldest()
                self._io.forget(self._listener)
                self._io.at(time.monotonic() + _PAUSE_S, self._listen)
                return
            with contextlib.suppress(OSError):  # The other side has gone already.
                self._greet(accepted)

    def _greet(self, accepted: socket.socket) -> None:
        if self._context:
            accepted = self._context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        limit_at = time.monotonic() + _STRANGER_S
        if not self._is_timing:
            self._is_timing = True
            self._io.at(limit_at, self._drop_late)
        nonce = "" if self._context else os.urandom(32).hex()
        self._strangers[_Stranger(self._io, accepted, nonce, self._on_hello, self._drop)] = limit_at
        if len(self._strangers) > _MAX_STRANGERS + 2 * len(self._expected):
            self._drop_oldest()

    def _drop_late(self) -> None:
        while self._strangers and next(iter(self._strangers.values())) <= time.monotonic():
            self._drop_oldest()
        self._is_timing = bool(self._strangers)
        if self._is_timing:
            self._io.at(next(iter(self._strangers.values())), self._drop_late)

    def _drop_oldest(self) -> None:
        if self._strangers:
            self._drop(next(iter(self._strangers)))

    def _drop(self, stranger: _Stranger) -> None:
        if stranger in self._strangers:
            del self._strangers[stranger]
            stranger.connection.close()

    def _on_hello(self, stranger: _Stranger, hello: str) -> None:
        """Let the stranger in if it knows the secret, and its node is expected."""
        kind, name, nonce, proved = (hello.split(" ") + [""] * 3)[:4]
        words = (kind, name, stranger.nonce, nonce)
        handle = self._expected.get(name)
        is_genuine = hmac.compare_digest(proved.encode(), proof(self.secret, "agent", *words).encode())
        if not (is_genuine and handle and not handle.is_over and kind in (RECORDS, ERRORS)):
            self._drop(stranger)
            return
        del self._strangers[stranger]
        tag = caller.tag_of(handle.start)
        stranger.connection.send(f"{proof(self.secret, 'launcher', tag, *words)} {tag}\n".encode())
        if kind == ERRORS:
            handle.on_errors_connected(stranger.connection)
        else:
            del self._expected[name]
            self.has_let_in = True
            handle.on_records_connected(stranger.connection)


class _Stranger:
    """A connection that has proved nothing yet."""

    def __init__(
        self,
        io: IoThread,
        accepted: socket.socket,
        nonce: str,
        on_hello: Callable[[_Stranger, str], object],
        drop: Callable[[_Stranger], object],
    ) -> None:
        """Without a ``nonce``, what the other side reaches here is proved otherwise: it begins."""
        self.nonce = nonce
        self._data = b""
        self._on_hello, self._drop = on_hello, drop
        self.connection = Connection(io, accepted, self._on_data, lambda: drop(self))
        if nonce:
            self.connection.send(f"ddplaunch {nonce}\n".encode())

    def _on_data(self, data: bytes) -> None:
        self._data += data
        hello, end, more = self._data.partition(b"\n")
        if more or len(self._data) > _MAX_HELLO_BYTES or not hello.isascii():
            self._drop(self)
        elif end:
            self._on_hello(self, hello.decode())


def chosen_address(config: LaunchConfig) -> str:
    """``--local-addr``, or that of ``--interface``, if it is an address of this machine: it may be one of the nodes."""
    if config.local_addr:
        return config.local_addr if network.is_local(config.local_addr) else ""
    with contextlib.suppress(LaunchError):
        return network.address_of("", config.interface) if config.interface else ""
    return ""
