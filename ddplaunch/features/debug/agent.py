"""The debug sessions of this node: processes of workers that have stopped in a debugger and ask for the terminal.

Runs in the agent. The thread of the socket for workers hands over connections, each session has a thread, and the main
thread passes on the launcher's orders. Decides nothing: the launcher says which session gets the terminal.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.features.debug.records import MAX_LINE_BYTES, TO_AGENT, SessionOpened, SessionRequest
from ddplaunch.protocol import wire
from ddplaunch.system import linux
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    import socket

    from ddplaunch.agent.workers.worker import Worker
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.debug.agent_session import DebugSession
    from ddplaunch.system.unix_socket import Connection

_REQUEST_S, _SENT_S = 5.0, 1.0
_MAX_SESSIONS = 1024


class DebugPart(Part):
    """All sessions of one agent, of all attempts."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._sessions: dict[int, DebugSession] = {}

    def for_worker(self, worker: Worker) -> dict[str, str]:
        """How its debuggers stop, and the socket that they ask for the terminal; see ``part`` in ``worker``."""
        chosen, name = self._node.spec.workers.debug_ranks, self._node.worker_socket.open()
        may_stop = chosen is None or worker.rank in chosen
        how = "never" if not may_stop else "errors" if self._node.spec.workers.debug_on_error else "calls"
        return {"debug": f"{how} {name}"} if name else {}

    def on_connection(self, connection: Connection) -> bool:
        """As ``Part.on_connection``: of a process that stops in a debugger."""
        if len(self._sessions) >= _MAX_SESSIONS:
            return False
        in_thread("debug session", lambda: self._serve(connection.socket))
        return True

    def on_event(self, event: object) -> bool:
        """Pass on an order of the launcher, unless its session has ended."""
        if not isinstance(event, TO_AGENT):
            return False
        with self._lock:
            session = self._sessions.get(event.session)
            if session:
                session.handle(event)
        return True

    def _serve(self, connection: socket.socket) -> None:
        """Serve a session, if it is one of a process of these workers."""
        from ddplaunch.features.debug.agent_session import DebugSession

        group, send = self._group, self._node.outbox.send
        with contextlib.closing(connection):
            request = _request(connection)
            if not (group and request):
                return
            worker = next((each for each in group.workers if each.pid == request.worker), None)
            if worker is None:
                return
            number = next(self._numbers)
            session = DebugSession(number, connection, linux.peer_credentials(connection)[0], send)
            with self._lock:
                self._sessions[number] = session
            self._mark(group, is_debugged=True)
            worker.in_post_mortem = request.is_post_mortem
            if worker.pump:  # What the process has printed before it stopped is to stand above the prompt.
                worker.pump.wait_until_sent(_SENT_S)
                self._node.outbox.is_written(_SENT_S)
            send(SessionOpened(number, group.attempt, worker.rank, group.host, request.place, request.is_post_mortem))
            try:
                session.run()
            finally:
                worker.in_post_mortem = False
                with self._lock:
                    del self._sessions[number]
                    session.close()
                self._mark(group, is_debugged=False)

    def _mark(self, group: WorkerGroup, *, is_debugged: bool) -> None:
        """What a rank does while it is debugged, or others while they wait for it, is no hang."""
        with self._lock:
            group.debugged += 1 if is_debugged else -1
            group.debugged_at = time.monotonic()
        self._node.post(lambda: None)  # Whoever measures for how long the workers are quiet looks again.


def _request(connection: socket.socket) -> SessionRequest | None:
    """What the process asks for; None if that is not understood."""
    connection.settimeout(_REQUEST_S)
    with contextlib.suppress(OSError, wire.ProtocolError):
        line = connection.recv(MAX_LINE_BYTES)
        connection.settimeout(None)
        request: SessionRequest = wire.decode(line, (SessionRequest,))
        return request
    return None


part = DebugPart
