"""Decides on rounds: who takes part, in which order, when all must stop, and what follows. Pure: no clock, no store.

Lives in the rendezvous process of the node that owns the endpoint. Every message of a node is one call of
``receive``; what that returns is sent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

from ddplaunch.host_ranges import fold
from ddplaunch.model import NodesExpected, WorkerExit
from ddplaunch.printable import shown
from ddplaunch.prospects import IN_A_ROW, why_hopeless
from ddplaunch.rendezvous import seating
from ddplaunch.rendezvous.round_end import RoundEnd
from ddplaunch.rounds import (
    Gathered,
    ListenForStore,
    NodeEnded,
    NodeGone,
    NodeJoined,
    RoundFormed,
    RoundOver,
    RunClosed,
    RunFull,
    StopRound,
    StoreListens,
    WorkerFailed,
)

_SHOWN_CHARACTERS = 1000
"""Of the hosts that have come, in the worst case; numbered ones fold to a few."""

Phase = Literal["gathering", "listening", "running", "stopping", "over"]


@dataclass(frozen=True)
class Sent:
    """A record for one node."""

    node_index: int
    record: object


@dataclass
class Coordinator:
    """The state of a run's rounds; ``serves`` is the node this runs on.

    ``seats`` are the node indices in rank order: a node keeps its seat over the rounds, and one that comes for a lost
    node takes that node's. ``expected`` are the seats as a launcher tells them; empty where nodes come by themselves.
    """

    serves: int
    min_nodes: int
    max_nodes: int
    max_restarts: int
    expected: tuple[int, ...] = ()
    attempt: int = 0
    restarts: int = 0
    phase: Phase = "gathering"
    seats: list[int] = field(default_factory=list)
    _waiting: dict[int, NodeJoined] = field(default_factory=dict)
    _hosts: dict[int, str] = field(default_factory=dict)
    _running: set[int] = field(default_factory=set)
    _leaving: set[int] = field(default_factory=set)
    _lost: set[int] = field(default_factory=set)
    _end: RoundEnd = field(default_factory=RoundEnd)
    _causes: tuple[WorkerExit | None, ...] = ()

    def receive(self, message: object) -> list[Sent]:
        """Take one message of a node and return what must be sent."""
        match message:
            case NodeJoined():
                return self._joined(message)
            case StoreListens(attempt=attempt) if self.phase == "listening" and attempt == self.attempt:
                return self._start(message)
            case WorkerFailed(node_index=index, attempt=attempt) if self._runs(index, attempt):
                self._end.alarms.append(index)
                return self._stop("")
            case NodeEnded(node_index=index, attempt=attempt) if self._runs(index, attempt):
                return self._ended(message)
            case NodeGone(node_index=index):
                return self._gone(index)
            case NodesExpected(seats=seats):
                return self._expect(seats)
        return []

    def gathered(self) -> list[Sent]:
        """For those that wait: who else does. Send it now and then; at every arrival it is too much for many nodes."""
        if self.phase != "gathering":
            return []
        hosts = shown(fold(joined.host for joined in self._waiting.values()), _SHOWN_CHARACTERS)
        needed, count = len(self.expected) or self.min_nodes, len(self._waiting)
        gathered = Gathered(hosts, count, max(0, needed - count))
        return [Sent(index, gathered) for index in self._waiting]

    def last_call(self) -> list[Sent]:
        """Nobody more has come in time: start with those that are there, if they are enough."""
        return self._form() if self.has_enough else []

    @property
    def has_enough(self) -> bool:
        """MIN nodes wait, fewer than MAX: the last call runs."""
        return self.phase == "gathering" and not self.expected and len(self._waiting) >= self.min_nodes

    @property
    def _are_all_here(self) -> bool:
        if self.expected:
            return len(self._waiting) >= len(self.expected) and self._waiting.keys() >= set(self.expected)
        return len(self._waiting) >= self.max_nodes and self._waiting.keys() >= set(self.seats) - self._lost

    def _runs(self, node_index: int, attempt: int) -> bool:
        return attempt == self.attempt and node_index in self._running

    # Gathering.

    def _joined(self, message: NodeJoined) -> list[Sent]:
        index = message.node_index
        self._waiting[index], self._hosts[index] = message, message.host
        self._lost.discard(index)
        if self.phase == "over":
            over = RoundOver(self.attempt, restarts=False, failed=True, reason="the run was over when this node came")
            return [Sent(index, over)]
        if self.phase == "gathering":
            return self._gather()
        has_room = index in self.expected if self.expected else len(self.seats) < self.max_nodes
        if self.phase == "running" and has_room:
            self._end.has_joined = True
            return self._stop(f"{message.host} joins")
        if not self.expected and index not in self.seats:
            if not has_room:
                return [Sent(index, RunFull(tuple(self._hosts[seat] for seat in self.seats)))]
            if self.phase == "listening":  # Nobody has started: the round is larger by this node.
                self.seats.append(index)
        return self._gather()

    def _gather(self) -> list[Sent]:
        if self.phase != "gathering":
            return []
        return self._form() if self._are_all_here else []

    def _expect(self, seats: tuple[int, ...]) -> list[Sent]:
        stay = set(seats)
        missing = [index for index in self.expected if index not in stay]
        self.expected = seats
        return [*(sent for index in missing for sent in self._gone(index)), *self._gather()]

    def _form(self) -> list[Sent]:
        self.seats = list(self.expected) or seating.seated(self.seats, self._waiting)[: self.max_nodes]
        self.phase = "listening"
        self.attempt = max(self.attempt, *(self._waiting[index].attempt for index in self.seats))
        return [Sent(self.seats[0], ListenForStore(self.attempt, self._reached()))]

    def _reached(self) -> str:
        """Where the workers of the other nodes will reach the first one: where the most have reached it just now."""
        if self.seats[0] != self.serves:
            return ""
        reached = Counter(self._waiting[index].reached for index in self.seats[1:])
        return reached.most_common(1)[0][0] if reached else ""

    def _start(self, store: StoreListens) -> list[Sent]:
        sizes = tuple(self._waiting.pop(index).local_world_size for index in self.seats)
        self._running, self._end, self.phase = set(self.seats), RoundEnd(), "running"
        rounds = seating.rounds(self.attempt, self.restarts, sizes, store)
        return [Sent(index, RoundFormed(round_)) for index, round_ in zip(self.seats, rounds, strict=True)]

    # Ending.

    def _stop(self, reason: str) -> list[Sent]:
        if self.phase != "running":
            return []
        self.phase, self._end.reason = "stopping", reason
        return [Sent(index, StopRound(self.attempt)) for index in self.seats if index in self._running]

    def _ended(self, message: NodeEnded) -> list[Sent]:
        self._running.discard(message.node_index)
        self._end.ends.append(message)
        if message.stopped:
            self._end.stopped = self._end.stopped or self._hosts[message.node_index]
        sent = self._stop("") if message.failed or message.stopped else []
        return [*sent, *self._over()]

    def _gone(self, node_index: int) -> list[Sent]:
        if self.phase == "over":
            self._leaving.discard(node_index)
            return [] if self._leaving else [Sent(self.serves, RunClosed())]
        self._waiting.pop(node_index, None)
        self._lost.add(node_index)
        if self.phase == "listening" and node_index in self.seats:
            self.phase = "gathering"
        if node_index not in self.seats or self.phase == "gathering":
            return self._gather()
        self._running.discard(node_index)
        self._end.has_lost = True
        reason = f"{self._hosts[node_index]} (node {self.seats.index(node_index)}) is lost"
        sent = self._stop(reason)
        self._end.reason = self._end.reason or reason
        return [*sent, *self._over()]

    def _over(self) -> list[Sent]:
        """Once no node runs: the verdict, to all that took part and to those that wait."""
        if self._running or self.phase not in ("running", "stopping"):
            return []
        over = self._end.verdict(
            self.attempt,
            has_restarts=self.restarts < self.max_restarts,
            may_change=bool(self.expected) or self.min_nodes < self.max_nodes,
        )
        self._causes = (*self._causes, None if self._end.has_lost else over.cause)[-IN_A_ROW:]
        if over.restarts and (why_not := why_hopeless(self._causes)):
            over = replace(over, restarts=False, reason=why_not)
        told = list(dict.fromkeys([*self.seats, *([] if over.restarts else self._waiting)]))
        if over.restarts:
            self.phase = "gathering"
            self.attempt += 1
            self.restarts += over.failed
        else:
            self.phase = "over"
            self._leaving = set(told) - self._lost - {self.serves}
        closed = [] if over.restarts or self._leaving else [Sent(self.serves, RunClosed())]
        # One launcher above all needs the cause, of many lines, only once.
        brief = replace(over, cause=None) if self.expected else over
        return [*(Sent(index, over if index == self.serves else brief) for index in told), *closed]
