"""Asks workers for torch's flight record, over their connections to the agent's socket (see ``worker_records``).

Runs in the agent: the thread of the socket brings connections, any other thread asks. A worker that does not answer
within the limit, because it is suspended or holds the GIL, is not asked again before its old answer has come.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from ddplaunch.features.hangs import worker_records
from ddplaunch.features.hangs.records import PendingCall
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import wire

if TYPE_CHECKING:
    from ddplaunch.system.unix_socket import Connection, LocalServer

ANSWER_S = 3.0
_LATE_S = 0.2
"""Time for those that have not answered an earlier question within its limit."""

_MAX_CONNECTIONS = 4096
MAX_NAME = 100
_MAX_CPU_S = float(1 << 30)


@dataclass(frozen=True)
class Answer:
    """What a worker has answered: JSON of ``worker_records``' keys, and torch's flight record; each may be empty."""

    facts: dict[str, object]
    record: bytes

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the worker has used for its answers so far; 0 if it does not tell."""
        value = self.facts.get(worker_records.CPU_S)
        return value if isinstance(value, float) and 0.0 <= value <= _MAX_CPU_S else 0.0

    @property
    def groups(self) -> dict[str, Any]:
        """As ``worker_records.GROUPS``; not checked: ``flight_record`` does."""
        found = self.facts.get(worker_records.GROUPS)
        return found if isinstance(found, dict) else {}

    @property
    def pending(self) -> PendingCall | None:
        """The function of torch.distributed in which the worker's main thread is."""
        with contextlib.suppress(wire.ProtocolError):
            return wire.from_json(PendingCall, self.facts.get(worker_records.PENDING))
        return None


class _Connection:
    def __init__(self, connected: socket.socket) -> None:
        self.socket, self.request = connected, b""
        self._received = bytearray()
        self._facts: dict[str, object] | None = None

    def ask(self, request: bytes) -> None:
        """Send a request, unless an earlier one is not answered yet. Raises OSError: the worker has ended."""
        if not self.request:
            self.socket.send(request, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            self.request = request

    def take(self, request: bytes) -> Answer | None:
        """The answer to ``request``, once it is complete; after a late one to another request, ask again.

        Raises:
            OSError: the worker has ended, or its answer is invalid or too long.
        """
        data = self.socket.recv(1 << 20, socket.MSG_DONTWAIT)
        if not data:
            raise ConnectionError("ended")
        self._received += data
        if self._facts is None:
            if b"\n" not in data:
                if len(self._received) > worker_records.MAX_PART_BYTES:
                    raise OSError("too long")
                return None
            line, _, self._received = self._received.partition(b"\n")
            self._facts = _facts(line)
        nbytes = self._facts.get(worker_records.NBYTES)
        if type(nbytes) is not int or not 0 <= nbytes <= worker_records.MAX_PART_BYTES:
            raise OSError("too long")
        if len(self._received) < nbytes:
            return None
        answer, answered = Answer(self._facts, bytes(self._received[:nbytes])), self.request
        self._received.clear()
        self._facts, self.request = None, b""
        if answered == request:
            return answer
        self.ask(request)
        return None


def _facts(line: bytearray) -> dict[str, object]:
    with contextlib.suppress(ValueError, RecursionError):
        facts = json.loads(line)
        if isinstance(facts, dict):
            return facts
    raise OSError("not an answer")


class Examiner:
    """The connections of one agent's workers, for all attempts.

    Attributes:
        on_accepted: called in the thread of the socket after each connection.
    """

    def __init__(self) -> None:
        self.on_accepted: Callable[[], None] = lambda: None
        self._connections: dict[int, _Connection] = {}
        self._forgotten: list[_Connection] = []
        self._is_asking = False
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def take(self, connection: Connection) -> bool:
        """Keep the connection of a worker, to ask it; an earlier one of its is closed. False if there are too many."""
        if len(self._connections) >= _MAX_CONNECTIONS:
            return False
        self.forget(connection.pid)
        with self._lock:
            self._connections[connection.pid] = _Connection(connection.socket)
        self.on_accepted()
        return True

    def close(self) -> None:
        """Close all connections."""
        for pid in list(self._connections):
            self.forget(pid)

    def is_connected(self, pid: int) -> bool:
        """Whether process ``pid`` can be asked: it has created a process group."""
        return pid in self._connections

    def forget(self, pid: int) -> None:
        """Close the connection of a process, before its pid can be another's."""
        with self._lock:
            connection = self._connections.pop(pid, None)
            if connection and self._is_asking:  # The thread that asks may wait for it, and closes it.
                self._forgotten.append(connection)
            elif connection:
                connection.socket.close()

    def ask(self, pids: Iterable[int], request: bytes, timeout_s: float = ANSWER_S) -> dict[int, Answer]:
        """Ask all ``pids`` at once. Returns the answers that come in time, by pid.

        Any thread; it waits while another asks.
        """
        with self._turn:
            with self._lock:
                self._is_asking = True
                asked = {pid: self._connections[pid] for pid in pids if pid in self._connections}
            try:
                return self._ask(asked, request, time.monotonic() + timeout_s)
            finally:
                with self._lock:
                    self._is_asking = False
                    while self._forgotten:
                        self._forgotten.pop().socket.close()

    def _ask(self, asked: dict[int, _Connection], request: bytes, deadline: float) -> dict[int, Answer]:
        late = {pid for pid, connection in asked.items() if connection.request}
        waiting: dict[int, _Connection] = {}
        answers: dict[int, Answer] = {}
        for pid, connection in asked.items():
            with self._forgets_if_ended(pid):
                connection.ask(request)
                waiting[pid] = connection
        late_end = min(deadline, time.monotonic() + _LATE_S)
        while waiting and (ready := _readable(waiting, deadline if waiting.keys() - late else late_end)):
            for pid in ready:
                connection = waiting.pop(pid)
                with self._forgets_if_ended(pid):
                    if answer := connection.take(request):
                        answers[pid] = answer
                    else:
                        waiting[pid] = connection
        return answers

    @contextlib.contextmanager
    def _forgets_if_ended(self, pid: int) -> Iterator[None]:
        """In the ``with`` block an OSError means that the process has ended."""
        try:
            yield
        except OSError:
            self.forget(pid)


def _readable(waiting: dict[int, _Connection], deadline: float) -> list[int]:
    poll = select.poll()
    by_fd = {connection.socket.fileno(): pid for pid, connection in waiting.items()}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)]


@cache
def of(_: LocalServer) -> Examiner:
    """The only one of an agent, which has one such socket: whoever asks a worker waits for its turn."""
    return Examiner()
