"""Rounds are decided right whatever the order of events: histories through the real coordinator.

``coordinator.txt`` has them. Below each step stands what nodes are told.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from ddplaunch.features.hangs.records import WorkerActivity
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import AssignNodes
from ddplaunch.protocol.rendezvous import (
    NodeCannotJoin,
    NodeLeft,
    NodeReady,
    NodeStopsRound,
    ReportToServer,
    RoundFormed,
    WorkersEnded,
    WorkersStoreListens,
)
from ddplaunch.protocol.results import Outcome, WorkerError, WorkerExit
from ddplaunch.rounds.coordinator import Coordinator, Outgoing
from ddplaunch.rounds.restarts import Restarts
from tests.support import golden

MESSAGES = {
    "itself": "ValueError: no",
    "again": "KeyError: 'x'",
    "unparsed": "SyntaxError: invalid syntax",
    "peer": "RuntimeError: Connection closed by peer [10.0.0.1]",
    "collective": "RuntimeError: Watchdog caught collective timeout",
}


def cause(rank: int, why: str = "itself", **found: str) -> WorkerExit:
    """The exit of a worker that names another host than its own, and the time of which decides nothing."""
    frames = "Traceback (most recent call last):\n  File ...\n" if why == "again" else ""
    error = WorkerError(MESSAGES[why], f"{frames}{MESSAGES[why]}\n" if frames else "", 0.0)
    time_s = -1.0 if why == "peer" else 0.0
    return WorkerExit(rank, 0, "a lie", 1, 1, stopped=False, time_s=time_s, duration_s=1.0, error=error, **found)


class Job:
    """A coordinator, and nodes on ``host0``, ``host1`` and so on. Its methods are the steps of a history."""

    def __init__(self, nodes: tuple[int, int] = (1, 9), restarts: int = 0, server: int = 0, **given: Any) -> None:
        self.said: list[str] = []
        self.coordinator = Coordinator(server, *nodes, Restarts(restarts), **given)

    def _tell(self, sent: list[Outgoing]) -> None:
        """Nodes that are told the same are in one line, and all that get their ranks."""
        formed = {index: record for index, record in sent if isinstance(record, RoundFormed)}
        if formed:
            self.said.append(round_text(formed))
        told: dict[str, list[str]] = {}
        for index, record in sent:
            if index not in formed:
                told.setdefault(text(record), []).append(str(index))
        self.said += [f"{' '.join(indices)} <- {shown}" for shown, indices in told.items()]

    def _send(self, record: object) -> None:
        self._tell(self.coordinator.receive(record))

    # Before a round.

    def join(self, index: str, *given: str) -> None:
        """With fields of NodeReady: ``join 1 attempt=3``."""
        joined = {"host": f"host{index}", "local_world_size": 2, **golden.keywords(", ".join(given))}
        self._send(NodeReady(int(index), **joined))

    def listen(self, index: str = "", attempt: str = "") -> None:
        """The first node of the round does, or another, or one for another attempt."""
        first = int(index or self.coordinator.participants[0])
        self._send(WorkersStoreListens(first, int(attempt or self.coordinator.attempt), f"10.0.0.{first}", 1234))

    def start(self, *indices: str) -> None:
        """These join, and the first of them listens."""
        for index in indices:
            self.join(index)
        self.listen()

    def waiting(self) -> None:
        self._tell(self.coordinator.waiting_nodes())

    def last_call(self) -> None:
        """The time for more nodes is over."""
        self._tell(self.coordinator.last_call_expired())

    def refuse(self, index: str) -> None:
        self._send(NodeCannotJoin(int(index), f"the hardware of host{index} is not sound"))

    # While it runs.

    def stops(self, index: str, attempt: str = "") -> None:
        self._send(NodeStopsRound(int(index), int(attempt or self.coordinator.attempt)))

    def report(self, index: str) -> None:
        self._send(ReportToServer(int(index), WorkerActivity(self.coordinator.attempt, quiet_s=1.0, host="a lie")))

    def lose(self, index: str) -> None:
        self._send(NodeLeft(int(index)))

    def assign(self, *given: str) -> None:
        """The launcher of all nodes names them, with fields of AssignNodes: ``assign 0 2 spares=1``."""
        assigned = tuple(int(word) for word in given if word.isdigit())
        settings = golden.keywords(", ".join(word for word in given if not word.isdigit()))
        self._send(AssignNodes("job7", assigned, **settings))

    # Its end.

    def _end(self, index: str, outcome: Outcome = "failed", attempt: str = "", **told: Any) -> None:
        number = int(attempt or self.coordinator.attempt)
        self._send(WorkersEnded(number, outcome, node_index=int(index), **told))

    def end(self, *indices: str) -> None:
        for index in indices:
            self._end(index, "succeeded")

    def fail(self, index: str, why: str = "", attempt: str = "") -> None:
        """Its worker by one of ``MESSAGES``, or nobody knows why."""
        self._end(index, attempt=attempt, cause=cause(int(index), why) if why else None)

    def hang(self, index: str) -> None:
        self._end(index, hung=True)

    def cannot_be_killed(self, index: str) -> None:
        self._end(index, reason=f"pid 7 on host{index} cannot be killed", has_unkillable=True)

    def is_broken(self, index: str) -> None:
        fault = f"host{index} is not used again: Xid 79"
        self._end(index, cause=cause(int(index), hardware="Xid 79"), node_leaves=fault)

    def asks_to_leave(self, index: str) -> None:
        self._end(index, "succeeded", node_leaves=f"host{index} is not used again: rank {index} asks for it: slow")

    def gives_up(self, index: str, why: str = "itself") -> None:
        self._end(index, cause=cause(int(index), why, give_up="no data"))

    def is_stopped(self, index: str, *reason: str) -> None:
        self._end(index, "stopped", stopped=True, reason=" ".join(reason))

    def fail_alike(self, index: str, loses: str = "") -> None:
        """A round of nodes 0 and 1: this one fails by one error, the other for want of it; only the verdict is told."""
        other = str(1 - int(index))
        self.start("0", "1")
        if loses:
            self.lose(other)
        self.stops(index)
        attempt = str(self.coordinator.attempt)
        self.fail(index, "again")
        self.fail(other, "peer", attempt)
        self.said[:] = self.said[-1:]

    def fail_first(self) -> None:
        """The first node of the round does, and the others succeed."""
        first, *others = self.coordinator.participants
        self.fail(str(first))
        self.end(*map(str, others))


def round_text(formed: dict[int, RoundFormed]) -> str:
    """A round as all its nodes are told of it, who must be told the same."""
    rounds = [record.round for record in formed.values()]
    world_size = sum(each.local_world_size for each in rounds)
    assert [each.node_rank for each in rounds] == list(range(len(rounds)))
    assert {(each.nnodes, each.world_size, each.master_port) for each in rounds} == {(len(rounds), world_size, 1234)}
    ((attempt, restarts, address),) = {(each.attempt, each.restart_count, each.master_addr) for each in rounds}
    (limit,) = {record.max_restarts for record in formed.values()}
    places = [f"{index} from rank {each.first_rank}" for index, each in zip(formed, rounds, strict=True)]
    sharing = [str(index) for index, record in formed.items() if record.shares_host]
    shared = f"; {' '.join(sharing)} share a host" if sharing else ""
    begin = f"round {attempt} at {address}, restarts {restarts} of {limit}"
    return f"{begin}, {world_size} ranks: {', '.join(places)}{shared}"


def text(record: object) -> str:
    """A record with the fields that are not as they are by default."""
    if isinstance(record, WorkerExit):
        return f"rank {record.rank} on {record.host}"
    if not is_dataclass(record):
        return repr(record)
    told = {field.name: getattr(record, field.name) for field in fields(record)}
    changed = {field.name: told[field.name] for field in fields(record) if told[field.name] != field.default}
    return f"{type(record).__name__}({', '.join(f'{name}={text(value)}' for name, value in changed.items())})"


def test_the_nodes_are_told_what_follows() -> None:
    """resilience 3.2 #22. torchrun: agent_api_test 7, 8; local_elastic_agent_test 17; rendezvous 16; test_run 14."""

    def history(case: str) -> str:
        _, settings, steps = case.split("; ")
        return golden.play(Job(**golden.keywords(settings)), steps)

    golden.check_pages("coordinator", history)


def test_what_a_node_is_told_does_not_grow_with_the_others() -> None:
    lengths = []
    for count in (10, 999):
        job = Job(assigned=tuple(range(count)))
        sent = [each for index in range(count) for each in job.coordinator.receive(NodeReady(index, "host", 2))]
        assert [index for index, _ in sent] == [0]
        formed = job.coordinator.receive(WorkersStoreListens(0, 0, "10.0.0.1", 1234))
        lengths.append(len(wire.encode(formed[0][1])))
    assert lengths[1] - lengths[0] < 10
