"""Nodes join, fail, leave and are lost, and a launcher names others, in any order: every round ends with one answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ddplaunch.protocol import first_failure
from ddplaunch.protocol.launcher_agent import AssignNodes
from ddplaunch.protocol.rendezvous import (
    AllNodesLeft,
    ListenForWorkersStore,
    NodeLeft,
    NodeReady,
    NodeStopsRound,
    RoundFormed,
    StopRound,
    WorkersEnded,
    WorkersStoreListens,
)
from ddplaunch.protocol.results import RoundVerdict, WorkerError, WorkerExit
from ddplaunch.rounds.coordinator import Coordinator, Phase
from ddplaunch.rounds.restarts import Restarts

NODES = range(5)
SERVER = 0
SIZES = (1, 2, 1, 3, 2)
PEER_LOST = "RuntimeError: Connection closed by peer"
ENDS = ("succeeded", "failed", "peer lost", "broken", "asks to leave", "gives up", "unkillable", "stopped by somebody")


@dataclass
class Node:
    """A node as its agent behaves.

    Attributes:
        joined: it waits for a round.
        runs: the attempt of which its workers run.
        reports: the attempt of which it has reported the end, and awaits the answer.
        must_stop: it was told to stop its workers.
        is_over: it has heard that no attempt follows.
    """

    index: int
    joined: bool = False
    runs: int | None = None
    reports: int | None = None
    must_stop: bool = False
    is_over: bool = False

    @property
    def may_join(self) -> bool:
        return not self.joined and self.runs is None and self.reports is None and not self.is_over


def failure(index: int, message: str = "OSError: a disk", **asked: str) -> WorkerExit:
    error = WorkerError(message, "", 0.0)
    return WorkerExit(index, 0, f"host{index}", 1, 1, stopped=False, time_s=0.0, duration_s=1.0, error=error, **asked)


class Rounds(RuleBasedStateMachine):
    """A coordinator and all that can happen to its nodes. The node that serves the rendezvous is not lost."""

    @initialize(least=st.integers(1, 3), more=st.integers(0, 2), limit=st.integers(0, 3), is_assigned=st.booleans())
    def begin(self, least: int, more: int, limit: int, is_assigned: bool) -> None:
        assigned = tuple(range(least + more)) if is_assigned else ()
        self.coordinator = Coordinator(SERVER, least, least + more, Restarts(limit), assigned)
        self.nodes = {index: Node(index) for index in NODES}
        self.lost: set[int] = set()
        self.lost_in: defaultdict[int | None, set[int]] = defaultdict(set)
        self.departing: set[int] = set()
        self.formed: dict[int, set[int]] = {}
        self.ended: dict[int, dict[int, WorkersEnded]] = {}
        self.answers: dict[int, dict[int, RoundVerdict]] = {}
        self.listens: list[tuple[int, int]] = []
        self.all_left = False

    # What the nodes do.

    def send(self, record: object) -> None:
        for index, answer in self.coordinator.receive(record):
            self.deliver(index, answer)

    def deliver(self, index: int, record: object) -> None:
        node = self.nodes[index]
        match record:
            case ListenForWorkersStore(attempt=attempt):
                self.listens.append((index, attempt))
            case RoundFormed(round=round_):
                assert node.joined
                node.joined, node.runs, node.must_stop = False, round_.attempt, False
                self.formed.setdefault(round_.attempt, set()).add(index)
            case StopRound(attempt=attempt):
                node.must_stop |= node.runs == attempt
            case RoundVerdict():
                self.on_verdict(node, record)
            case AllNodesLeft():
                assert index == SERVER
                self.all_left = True

    def on_verdict(self, node: Node, verdict: RoundVerdict) -> None:
        attempt = verdict.attempt
        assert verdict.decision or verdict.reason, "an answer has a reason"
        assert verdict.attempt_follows or not verdict.restart_follows
        if node.reports == attempt:
            self.answers.setdefault(attempt, {})
            assert node.index not in self.answers[attempt], "one answer for each round"
            self.answers[attempt][node.index] = verdict
            self.check(verdict, list(self.ended[attempt].values()))
            assert self.formed[attempt] <= self.ended[attempt].keys() | self.lost_in[attempt], "no result is lost"
        node.reports, node.is_over = None, not verdict.attempt_follows
        node.joined = node.joined and verdict.attempt_follows

    def check(self, verdict: RoundVerdict, reports: list[WorkersEnded]) -> None:
        """What the nodes have reported is in the answer."""
        has_failed = any(report.outcome == "failed" and not _is_consequence(report) for report in reports)
        is_stopped = any(report.stopped for report in reports)
        assert verdict.outcome == "failed" or not has_failed
        assert verdict.outcome != "succeeded" or {report.outcome for report in reports} == {"succeeded"}
        if is_stopped or any(report.has_unkillable for report in reports):
            assert not verdict.attempt_follows
        if verdict.restart_follows:
            assert any(report.outcome == "failed" for report in reports)
            assert has_failed or not self.lost_in[verdict.attempt], "for the loss of a node no restart is counted"
        followed = {told.decision for told in self.answers[verdict.attempt].values() if told.attempt_follows}
        assert len(followed) <= 1, "all are told the same"

    def some(self, condition: Callable[[Node], object]) -> list[Node]:
        return [node for node in self.nodes.values() if node.index not in self.lost and condition(node)]

    def join(self, node: Node) -> None:
        node.joined = True
        self.send(NodeReady(node.index, f"host{node.index}", SIZES[node.index]))

    @rule(data=st.data())
    def one_joins(self, data: st.DataObject) -> None:
        if found := self.some(lambda node: node.may_join):
            self.join(data.draw(st.sampled_from(found)))

    @rule()
    def all_join(self) -> None:
        for node in self.some(lambda node: node.may_join):
            self.join(node)

    @rule()
    def listen(self) -> None:
        while self.listens:
            index, attempt = self.listens.pop(0)
            if index not in self.lost:
                self.send(WorkersStoreListens(index, attempt, "10.0.0.1", 1))

    def end(self, node: Node, how: str) -> None:
        """The workers of a node end; ``how`` they do unless they are stopped."""
        attempt = node.runs or 0
        if how in ("failed", "peer lost", "broken", "gives up") and not node.must_stop:
            self.send(NodeStopsRound(node.index, attempt))
        ended = _ended(node.index, attempt, "stopped" if node.must_stop and how == "succeeded" else how)
        node.runs, node.reports = None, attempt
        self.ended.setdefault(attempt, {})[node.index] = ended
        self.send(ended)

    @rule(data=st.data(), how=st.sampled_from(ENDS))
    def one_ends(self, data: st.DataObject, how: str) -> None:
        if found := self.some(lambda node: node.runs is not None):
            self.end(data.draw(st.sampled_from(found)), how)

    @rule(how=st.sampled_from(ENDS))
    def all_end(self, how: str) -> None:
        """One by itself, and the others are stopped for it, or succeed."""
        for node in self.some(lambda node: node.runs is not None):
            self.end(node, how)
            how = "succeeded"

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A record of an earlier round arrives late, or twice: it changes nothing."""
        if old := [ended for by_node in self.ended.values() for ended in by_node.values()]:
            ended = data.draw(st.sampled_from(old))
            assert self.coordinator.receive(ended) == []
            assert self.coordinator.receive(NodeStopsRound(ended.node_index, ended.attempt)) == []

    @rule()
    def last_call(self) -> None:
        for index, record in self.coordinator.last_call_expired():
            self.deliver(index, record)

    # What happens to them.

    @rule(index=st.sampled_from(NODES[1:]))
    def lose(self, index: int) -> None:
        """No heartbeat for so long; a launcher that leads all nodes then names others (``assign``)."""
        if index in self.lost or not (node := self.nodes[index]).joined | (node.runs is not None):
            return
        self.gone(index)
        self.send(NodeLeft(index))

    @rule()
    def come_back(self) -> None:
        """Other agents on the hosts of the nodes that were lost; where a launcher leads, it has not named them."""
        for index in sorted(self.lost - set(self.coordinator.assigned)):
            self.nodes[index] = Node(index)
        self.lost &= set(self.coordinator.assigned)

    @precondition(lambda self: self.coordinator.assigned)
    @rule(data=st.data())
    def assign(self, data: st.DataObject) -> None:
        """The launcher removes nodes that are lost, and perhaps others; spares take their positions."""
        assigned, avoided = self.coordinator.assigned, self.coordinator._avoided
        kept = [i for i in assigned if i not in self.lost and (i == SERVER or data.draw(st.booleans()))]
        spares = [i for i in NODES if i not in {*assigned, *self.lost} and f"host{i}" not in avoided]
        added = data.draw(st.lists(st.sampled_from(spares), unique=True, max_size=2)) if spares else []
        for index in set(self.coordinator.assigned) - set(kept):
            self.gone(index)
        self.departing &= set(kept)
        self.send(AssignNodes("run#1", (*kept, *added), tuple(self.departing), len(spares) - len(added)))

    @precondition(lambda self: self.coordinator.assigned)
    @rule(data=st.data())
    def depart(self, data: st.DataObject) -> None:
        """SLURM drains nodes whose workers run, or some stay after all."""
        running = {node.index for node in self.some(lambda node: node.runs is not None)}
        may_depart = sorted((running | self.departing) & set(self.coordinator.assigned[1:]))
        self.departing = set(data.draw(st.lists(st.sampled_from(may_depart)))) if may_depart else set()
        spares = self.coordinator.spares
        self.send(AssignNodes("run#1", self.coordinator.assigned, tuple(self.departing), spares))

    @rule()
    def leave(self) -> None:
        """The nodes that have heard of the end leave."""
        for node in self.some(lambda node: node.is_over and node.index != SERVER):
            self.lost.add(node.index)
            self.send(NodeLeft(node.index))
        assert self.all_left or not self.nodes[SERVER].is_over, "the node that serves the rendezvous may go"

    def gone(self, index: int) -> None:
        self.lost.add(index)
        self.lost_in[self.nodes[index].runs].add(index)

    # What is always true.

    @invariant()
    def nobody_waits_for_a_node_that_has_ended_or_is_lost(self) -> None:
        coordinator = self.coordinator
        if coordinator.phase in (Phase.RUNNING, Phase.STOPPING):
            assert coordinator._running
            for index in coordinator._running:
                assert self.nodes[index].runs == coordinator.attempt
                assert index not in self.lost

    @invariant()
    def nobody_is_left_without_an_answer(self) -> None:
        if self.coordinator.phase in (Phase.WAITING, Phase.FINISHED):
            assert not self.some(lambda node: node.reports is not None)

    @invariant()
    def a_round_is_formed_as_soon_as_all_are_there(self) -> None:
        coordinator = self.coordinator
        there = {node.index for node in self.some(lambda node: node.joined)}
        if coordinator.phase is Phase.WAITING and not coordinator.assigned:
            assert len(there) < coordinator.max_nodes or not there >= set(coordinator.participants) - self.lost
        if coordinator.phase is Phase.WAITING and coordinator.assigned:
            hosts = {f"host{index}" for index in coordinator.assigned}
            if not hosts & coordinator._avoided and not self.departing:
                assert not there >= set(coordinator.assigned)

    @invariant()
    def no_round_has_a_node_that_departs_unless_it_has_begun(self) -> None:
        if self.coordinator.phase is Phase.STARTING:
            assert self.departing.isdisjoint(self.coordinator.participants) or not self.coordinator.assigned

    @invariant()
    def no_more_restarts_than_allowed(self) -> None:
        restarts = self.coordinator.restarts
        followed = sum(any(told.restart_follows for told in each.values()) for each in self.answers.values())
        assert followed <= restarts.restart_count <= restarts.max_restarts


def _is_consequence(report: WorkersEnded) -> bool:
    return report.cause is not None and first_failure.is_consequence(report.cause)


def _ended(index: int, attempt: int, how: str) -> WorkersEnded:
    outcome = how if how in ("succeeded", "stopped") else "stopped" if how == "stopped by somebody" else "failed"
    ended = WorkersEnded(attempt, outcome, node_index=index)  # type: ignore[arg-type]
    match how:
        case "failed":
            return replace(ended, cause=failure(index))
        case "peer lost":
            return replace(ended, cause=failure(index, PEER_LOST))
        case "broken":
            return replace(ended, cause=failure(index, hardware="Xid 79"), node_leaves=f"host{index} is broken")
        case "asks to leave":
            return replace(ended, cause=failure(index, avoid_node="slow"), node_leaves=f"host{index} is slow")
        case "gives up":
            return replace(ended, cause=failure(index, give_up="no data"))
        case "unkillable":
            return replace(ended, has_unkillable=True)
        case "stopped by somebody":
            return replace(ended, stopped=True)
    return ended


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=100, stateful_step_count=40)
