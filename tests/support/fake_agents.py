"""Agents and a transport that exist only for the launcher: nothing runs, and what an agent is sent is kept."""

from __future__ import annotations

from collections.abc import Callable

from ddplaunch.config import RendezvousConfig
from ddplaunch.launcher.attempts import Attempts
from ddplaunch.launcher.nodes import Nodes
from ddplaunch.launcher.participants import Participants
from ddplaunch.protocol.launcher_agent import JoinRendezvous
from ddplaunch.protocol.results import AttemptResult


class FakeHandle:
    """Stands for ``AgentHandle``.

    Attributes:
        sent: the records that the agent was sent.
    """

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.is_killed = False
        self.is_ended = False
        self.inherited_fds: dict[str, int] = {}
        self.heard_at = 0.0

    def send(self, record: object) -> None:
        self.sent.append(record)

    def wake(self) -> None: ...

    def kill(self) -> None:
        self.is_killed = True

    def end_input(self) -> None:
        self.is_ended = True

    def close(self, timeout_s: float = 5.0) -> int:
        return 0


class FakeTransport:
    """Stands for ``Transport`` to these hosts."""

    is_remote = True

    def __init__(self, *hosts: str) -> None:
        self.node_names = hosts

    def start(self, index: int) -> FakeHandle:
        return FakeHandle()

    def sweep(self, index: int, _on_event: object) -> FakeHandle:
        return FakeHandle()

    def start_together(self) -> None: ...

    def close(self) -> None: ...


def unexplained(result: AttemptResult, _evidence: object) -> AttemptResult:
    """For ``Attempts``: nothing is added to a result."""
    return result


def participants_of(
    nnodes: tuple[int, int],
    *hosts: str,
    rendezvous: RendezvousConfig | None = None,
    attempts: Attempts | None = None,
    show: Callable[[str, int], None] = lambda *_: None,
) -> Participants:
    """A run on these hosts, spares included, whose first agents are started and not connected yet."""
    nodes = Nodes(FakeTransport(*hosts), lambda *_: None)  # type: ignore[arg-type,return-value]
    participants = Participants(nodes, *nnodes, rendezvous, attempts or Attempts(unexplained), show)
    list(participants.start())
    return participants


def brief(record: object) -> str:
    """A record that an agent was sent; of a rendezvous what differs between nodes."""
    if not isinstance(record, JoinRendezvous):
        return str(record)
    here = record.rendezvous
    facts = {
        "serves": here.is_server,
        "at": here.server_addresses,
        "port": here.port,
        "attempt": here.attempt,
        "restarts": here.restart_count,
        "assigned": here.assigned,
        "departing": here.departing,
    }
    return ", ".join(
        [f"join {here.token} as {here.node_index}", *(f"{name} {facts[name]}" for name in facts if facts[name])]
    )
