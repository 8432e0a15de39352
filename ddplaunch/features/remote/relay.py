"""Connects a node on which a login has started the agent to the launcher, so that the login can end: ``connect_node``.

Runs on the node, in the process that the login has started. It connects twice to the launcher, encrypted, and forks.
Its child becomes the agent. Itself becomes a relay, which passes on what the agent and the launcher send, until the
agent has ended. One connection has the records, unchanged. The other one, of the kind ``ERRORS``, has lines: of the
agent's stderr, and at last its exit code; from the launcher, orders for the relay.

A relay whose agent has ended waits for ``_LAST_S`` for the launcher to close its end. If the relay is killed, or the
launcher, the agent's stdin ends, and so the agent. If the network is cut, the agent gets no pings, and ends by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

from ddplaunch.features.remote.io_thread import Connection, IoThread, Lines
from ddplaunch.protocol import environment
from ddplaunch.system import linux

if TYPE_CHECKING:
    from ddplaunch.features.remote.tls import TlsSocket

RECORDS, ERRORS = "records", "errors"
"""The kinds of connections: stdin and stdout of the agent; its stderr."""

END_INPUT, CONTINUE, KILL = "end", "continue", "kill"
"""Orders: the agent's stdin ends behind so many bytes; signal the agent."""

NO_CONNECTION = "it cannot connect to the launcher"
"""Begins the reason if the launcher cannot be reached."""

EXITED = "@ddplaunch-exit@ "
"""Begins the last line of the connection ``ERRORS``: the exit code follows, negative for a signal."""

_TRY_S = 3.0
"""Seconds for a connection. The launcher listens already: there is no second try."""

SEND_BUFFER_BYTES = 32 << 10
"""Half of the bytes of an agent's output that may be in transit, since the kernel doubles it. On a slow link they delay
the agent's answers by a second, and so the requests to the rendezvous store."""

_KEEP_ALIVE_S = 60
CGROUP = "/proc/self/cgroup"
_LAST_S = 10.0
_SYSTEMD_S = 2.0


def proof(secret: str, *words: str) -> str:
    """Shows that its sender knows the secret."""
    return hmac.digest(secret.encode(), " ".join(words).encode(), "sha256").hex()


def connect_node(line: bytes, marker: bytes) -> str:
    """Connect to the launcher.

    Args:
        line: what it has sent for this, as ``AgentListener.given`` returns it.
        marker: what the launcher reads from the login, if the connections are open.

    Returns:
        Empty in the process that becomes the agent: its standard streams lead to the launcher. Otherwise why there is
        no connection, and nothing has changed.
    """
    given = json.loads(line)
    if given.get("in_vain"):
        return "other nodes cannot connect to the launcher"
    if why_it_ends := _ends_with_login():
        return f"systemd ends there what a login has started, when it ends ({why_it_ends})"
    why = []
    for address in given["addresses"] or os.environ.get("SSH_CONNECTION", "").split()[:1]:
        with contextlib.ExitStack() as stack:
            try:
                errors, records = [stack.enter_context(_connect(address, given, kind)) for kind in (ERRORS, RECORDS)]
            except (OSError, ImportError) as error:  # A Python may lack the module ssl.
                reason = getattr(error, "strerror", None) or error
                why.append(f"{NO_CONNECTION} at {address}:{given['port']} ({reason})")
            else:
                _become_agent(records, errors, marker)
                return ""
    return ", ".join(why) or "it has no address of the launcher"


def _ends_with_login() -> str:
    """Why systemd ends what a login has started, when it ends; empty if it does not."""
    with open(CGROUP) as file:
        group = file.read()
    if re.search(r"/ssh\S*@\S*\.service", group):  # Each connection is a service: without PAM, the login is in it.
        return "the login is a service of its own"
    if "/session-" not in group:
        return ""
    import subprocess

    place = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["busctl", "--system", "get-property", *place, "KillUserProcesses"]
        told = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SYSTEMD_S, check=False)
        return "KillUserProcesses=yes in logind.conf" if told.stdout.split() == [b"b", b"true"] else ""
    return ""


def _connect(address: str, given: dict[str, Any], kind: str) -> TlsSocket:
    """Raises OSError, also if another program answers."""
    from ddplaunch.features.remote import tls

    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(socket.create_connection((address, given["port"]), _TRY_S))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        # Firewalls forget a connection that says nothing for an hour, as that of ``ERRORS`` until the end.
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S)
        connection = stack.enter_context(tls.client_context(given["certificate"]).wrap_socket(plain))
        own = hashlib.sha256(os.urandom(32)).hexdigest()
        hello = (kind, given["name"], own, proof(given["secret"], "agent", kind, given["name"], "", own))
        connection.sendall((" ".join(hello) + "\n").encode())
        answer = b""
        while not answer.endswith(b"\n"):
            byte = connection.recv(1)
            if not byte:
                raise OSError("the launcher has closed the connection")
            answer += byte
        stack.pop_all()
    assert isinstance(connection, tls.TlsSocket)
    return connection


def _become_agent(records: TlsSocket, errors: TlsSocket, marker: bytes) -> None:
    """Returns in the child. The other process is the relay, and ends here."""
    agent_streams, streams = socket.socketpair()
    agent_streams.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    agent_stderr, stderr = socket.socketpair()
    pid = os.fork()
    if pid:
        try:
            os.write(1, marker)
            _leave_login(agent_stderr)
            linux.set_command_line(["ddplaunch", "relay", os.environ.get(environment.RUN_ID, "")])
            agent_streams.close()
            agent_stderr.close()
            _relay(pid, streams, stderr, records, errors)
        finally:
            os._exit(0)
    for number, own in ((0, agent_streams), (1, agent_streams), (2, agent_stderr)):
        os.dup2(own.fileno(), number)
    for each in (agent_streams, streams, agent_stderr, stderr, records, errors):
        each.close()


def _leave_login(stderr: socket.socket) -> None:
    """Close the streams of the login. What Python says of an error in a thread goes where the agent's stderr goes."""
    with open(os.devnull, "r+b", 0) as null:
        for number in (0, 1):
            os.dup2(null.fileno(), number)
    os.dup2(stderr.fileno(), 2)


def _relay(pid: int, *connections: socket.socket) -> None:
    """Returns when the agent, the process ``pid``, has ended, and what it has said is delivered."""
    io = IoThread("relay")
    relay = Relay(io, pid)
    io.call(lambda: relay.begin(*connections))
    # The pid stays the agent's until the thread has seen its end: it sends signals.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    io.call(relay.on_exited)
    relay.is_over.wait(_LAST_S)


class Relay:
    """Passes on what the agent, the process ``pid``, and the launcher send. In the thread of ``io``.

    Attributes:
        is_over: the agent has ended, and the launcher knows all that it has said.
    """

    def __init__(self, io: IoThread, pid: int) -> None:
        self.is_over = threading.Event()
        self._io, self._pid = io, pid
        self._received = 0
        self._input_bytes: int | None = None
        self._exit_code: int | None = None
        self._agent_is_closed = self._launcher_is_closed = False

    def begin(
        self, streams: socket.socket, stderr: socket.socket, records: socket.socket, errors: socket.socket
    ) -> None:
        """Serve these connections: two with the agent, two with the launcher."""
        self._agent = Connection(self._io, streams, self._from_agent, self._on_agent_closed)
        self._records = Connection(self._io, records, self._from_launcher, self._on_launcher_closed)
        self._errors = Connection(self._io, errors, Lines(self._on_order).add, lambda: None)
        self._stderr = Connection(self._io, stderr, self._errors.send, lambda: None)
        self._agent.on_sent = lambda: setattr(self._records, "is_held", False)
        self._records.on_sent = self._on_records_sent

    def on_exited(self) -> None:
        """The agent has ended; what it has sent may not all have been read."""
        self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._end_if_all_is_sent()

    def _from_agent(self, data: bytes) -> None:
        self._records.send(data)
        self._agent.is_held = self._records.waits

    def _on_records_sent(self) -> None:
        self._agent.is_held = False
        self._end_if_all_is_sent()

    def _on_agent_closed(self) -> None:
        self._agent_is_closed = True
        self._end_if_all_is_sent()

    def _end_if_all_is_sent(self) -> None:
        if self._exit_code is None or not self._agent_is_closed or self._records.waits:
            return
        if self._launcher_is_closed:
            self.is_over.set()
            return
        self._stderr.read_rest()
        self._errors.send(f"{EXITED}{self._exit_code}\n".encode())
        self._errors.end()
        # The kernel would drop what is on its way, if the connection were closed while something comes.
        self._records.on_data, self._records.on_sent = lambda _: None, lambda: None
        self._records.end()

    def _from_launcher(self, data: bytes) -> None:
        self._received += len(data)
        self._agent.send(data)
        self._records.is_held = self._agent.waits
        self._end_input_if_all_came()

    def _on_launcher_closed(self) -> None:
        self._launcher_is_closed = True
        self._agent.on_data = lambda _: None
        self._agent.is_held = False
        self._agent.end()
        self._end_if_all_is_sent()

    def _on_order(self, line: str) -> None:
        order, _, number = line.partition(" ")
        if order == END_INPUT:
            self._input_bytes = int(number)
            self._end_input_if_all_came()
        elif order in (CONTINUE, KILL) and self._exit_code is None:
            os.kill(self._pid, signal.SIGCONT if order == CONTINUE else signal.SIGKILL)

    def _end_input_if_all_came(self) -> None:
        if self._received == self._input_bytes:
            self._agent.end()
