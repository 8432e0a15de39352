"""What nodes tell of an attempt becomes one result, whatever the order, and whoever is lost on the way."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.launcher.attempts import Attempts
from ddplaunch.protocol.launcher_agent import Report
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from tests.support import golden
from tests.support.fake_agents import unexplained


def exit_(node: int, returncode: int = 0) -> WorkerExit:
    return WorkerExit(node, 0, f"node{node}", 1, returncode, stopped=False, time_s=0.0, duration_s=1.0)


def told(result: AttemptResult) -> str:
    ranks = ",".join(str(each.rank) for each in result.exits)
    follows = "a restart follows" if result.restart_follows else "another follows" if result.attempt_follows else "last"
    causes = [f"because of rank {result.cause.rank}"] if result.cause else []
    what = f"attempt {result.attempt} of ranks {ranks}: {result.outcome} in {result.duration_s:g} s"
    return "; ".join([what, follows, *causes, *filter(None, [result.reason, result.decision])])


def explained(result: AttemptResult, evidence: Sequence[Report]) -> AttemptResult:
    return replace(result, reason=" and ".join(map(str, evidence)) or result.reason)


class Launcher:
    """Its methods are the steps of a story; the last argument is the nodes that take part."""

    def __init__(self) -> None:
        self.attempts = Attempts(explained)

    def start(self, node: str, attempt: str, nodes: str) -> list[str]:
        is_first, completed = self.attempts.on_started(int(node), int(attempt), [*map(int, nodes)])
        return ["first"] * is_first + [*map(told, completed)]

    def end(self, node: str, attempt: str, outcome: str, *words: str) -> list[str]:
        """``words``: what follows, ``cause``, and values of fields."""
        *facts, nodes = words
        given = dict(fact.split("=", 1) for fact in facts if "=" in fact)
        result = AttemptResult(
            int(attempt),
            outcome,  # type: ignore[arg-type]
            (exit_(int(node)),),
            duration_s=float(given.get("duration_s", 1)),
            reason=given.get("reason", ""),
            decision=given.get("decision", ""),
            cause=exit_(int(node), 7) if "cause" in facts else None,
            attempt_follows=bool({"follows", "restarts"} & {*facts}),
            restart_follows="restarts" in facts,
        )
        evidence: Any = [given["knows"]] if "knows" in given else []
        return [*map(told, self.attempts.on_ended(int(node), result, [*map(int, nodes)], evidence))]

    def lose(self, node: str) -> list[str]:
        return [*map(told, self.attempts.remove_node(int(node)))]

    def close(self) -> list[str]:
        return [*map(told, self.attempts.close())]

    def play(self, step: str) -> str:
        word, *arguments = shlex.split(step)
        said = getattr(self, word)(*arguments)
        known = ", the outcome is known" if self.attempts.outcome_is_known else ""
        counts = f"{self.attempts.restart_count} restarts, next is attempt {self.attempts.next_number}{known}"
        return "\n".join([step, *(f"    {line}" for line in (*said, counts))])


def test_what_nodes_report_becomes_one_result_of_each_attempt() -> None:
    """A story is a sentence, and steps."""
    golden.check_pages("attempts", lambda story: "\n".join(map(Launcher().play, story.partition(": ")[2].split(", "))))


# Each node has a channel of its own: records of two nodes arrive in any order, and the results are always the same.

NODES = range(4)


@dataclass(frozen=True)
class Started:
    """A node's workers run."""

    attempt: int


@dataclass(frozen=True)
class Gone:
    """The node is lost, or has left: the launcher hears no more of it, but what its channel still had may follow."""


Record = Started | AttemptResult | Gone


@dataclass
class Reader:
    """What a launcher does with the records of nodes."""

    attempts: Attempts = field(default_factory=lambda: Attempts(unexplained))
    gone: set[int] = field(default_factory=set)
    shown: list[AttemptResult] = field(default_factory=list)

    def read(self, node: int, record: Record) -> None:
        there = [each for each in NODES if each not in self.gone]
        match record:
            case Started(attempt=number):
                self.shown += self.attempts.on_started(node, number, there)[1]
            case AttemptResult():
                self.shown += self.attempts.on_ended(node, record, there)
            case Gone():
                self.gone.add(node)
                self.shown += self.attempts.remove_node(node)

    def known(self) -> tuple[object, ...]:
        """All that other parts ask for; the last is what is known at the end of the run."""
        counts = self.attempts.restart_count, self.attempts.outcome_is_known, self.attempts.next_number
        self.shown += self.attempts.close()
        return *counts, self.attempts.ended


@st.composite
def results(draw: st.DrawFn, node: int, number: int) -> AttemptResult:
    """One node's part of an attempt; nodes may disagree: the verdict does not reach a node that is cut off."""
    exit_ = WorkerExit(node, 0, f"node{node}", 1, draw(st.integers(0, 1)), stopped=False, time_s=0.0, duration_s=1.0)
    return AttemptResult(
        number,
        draw(st.sampled_from(["succeeded", "failed", "stopped"])),
        (exit_,),
        duration_s=draw(st.integers(0, 3)),
        attempt_follows=draw(st.sampled_from([True, True, True, False])),
        reason=draw(st.sampled_from(["", f"the reason of node {node}"])),
        cause=draw(st.sampled_from([None, exit_])),
        node_leaves=draw(st.sampled_from(["", "", f"node {node} is not used again"])),
    )


@st.composite
def channels(draw: st.DrawFn) -> dict[int, list[Record]]:
    """The records of each node, in order: nodes join at some attempt, fail before all workers run, leave or are lost.

    The last record may be any: the rest is still on its way.
    """
    sent: dict[int, list[Record]] = {}
    for node in NODES:
        records: list[Record] = []
        for number in range(draw(st.integers(0, 3)), draw(st.integers(1, 4))):
            records += [Started(number)] if draw(st.booleans()) else []
            records.append(draw(results(node, number)))
        if draw(st.booleans()):
            del records[draw(st.integers(0, len(records))) :]
        if draw(st.booleans()):
            records.insert(draw(st.integers(0, len(records))), Gone())
        sent[node] = records
    return sent


def orders(sent: dict[int, list[Record]]) -> st.SearchStrategy[list[int]]:
    """Which node's next record is read."""
    return st.permutations([node for node in NODES for _ in sent[node]])


def in_order(record: Record, last: int) -> tuple[int, bool]:
    """By attempt, starts first; ``last`` is the number of the node's record before a Gone, which follows it."""
    number = last if isinstance(record, Gone) else record.attempt
    return number, not isinstance(record, Started)


@given(channels(), st.data())
def test_the_order_between_nodes_changes_nothing(sent: dict[int, list[Record]], data: st.DataObject) -> None:
    whatever, position = Reader(), dict.fromkeys(NODES, 0)
    for node in data.draw(orders(sent)):
        whatever.read(node, sent[node][position[node]])
        position[node] += 1
    orderly = Reader()
    for node, record in delivered_in_order(sent):
        orderly.read(node, record)
    assert whatever.known() == orderly.known()
    assert whatever.shown == whatever.attempts.ended, "an attempt is shown once, whole and in order"


def delivered_in_order(sent: dict[int, list[Record]]) -> list[tuple[int, Record]]:
    """Attempt by attempt; a node that has gone is heard no more."""
    keyed = []
    for node, records in sent.items():
        last = -1
        for place, record in enumerate(records):
            last = max(last, in_order(record, last)[0])
            keyed.append((last, in_order(record, last)[1], node, place, record))
    return [(node, record) for _, _, node, _, record in sorted(keyed, key=lambda each: each[:4])]


@given(channels(), st.data())
def test_no_report_is_dropped_whoever_is_believed_to_take_part(
    sent: dict[int, list[Record]], data: st.DataObject
) -> None:
    """Also where the launcher does not know, or knows no more, that a node takes part."""
    attempts, told, gone = Attempts(unexplained), set(), set()
    position = dict.fromkeys(NODES, 0)
    for node in data.draw(orders(sent)):
        record, believed = sent[node][position[node]], data.draw(st.sets(st.sampled_from(NODES)))
        position[node] += 1
        if isinstance(record, Gone):
            gone.add(node)
            attempts.remove_node(node)
        elif isinstance(record, Started):
            attempts.on_started(node, record.attempt, [*believed])
        else:
            told |= set() if node in gone else {(record.attempt, node)}
            attempts.on_ended(node, record, [*believed])
    attempts.close()
    numbers = [ended.attempt for ended in attempts.ended]
    assert numbers == sorted(set(numbers))
    assert {(ended.attempt, exit_.rank) for ended in attempts.ended for exit_ in ended.exits} == told
    assert sum(len(ended.exits) for ended in attempts.ended) == len(told)
