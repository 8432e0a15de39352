"""Makes the failures of a rehearsal happen: ``--inject``. Main thread only; no thread, no polling, only deadlines.

A worker is harmed by its agent, which alone knows that the pid is still the worker's. A whole node is the processes
that carry its mark. What this machine cannot pretend: the processes of a lost node close their connections as they die,
where those of a machine without power would rest; and those of a node that is cut off stand still meanwhile, where
real ones would go on until they need the others.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddplaunch import injection as injections
from ddplaunch.harm import Inflict, Inflicted
from ddplaunch.launcher.handles import AgentLost, Node
from ddplaunch.launcher.injection_account import Case, account
from ddplaunch.launcher.line_watch import LineSeen
from ddplaunch.records import AttemptEnded, AttemptStarted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.injection import Injection
    from ddplaunch.launcher.heartbeats import Heartbeats
    from ddplaunch.model import Injected, RunResult

_NEVER = float("inf")
_ROUNDS = 20
"""A process that starts others while it is stopped is met again; one that does so for ever is not waited for."""


@dataclass
class _Armed(Case):
    """One injection. ``node`` and ``local_rank`` say to whom, from the start of its attempt there.

    ``seen_on`` are the nodes of which a worker has printed the line.
    """

    node: Node | None = None
    local_rank: int = 0
    due: float = _NEVER
    heals: float = _NEVER
    seen_on: set[int] = field(default_factory=set)


class Injector:
    """All injections of a run."""

    def __init__(
        self, asked: Sequence[Injection], signal_node: Callable[[int, int], int], heartbeats: Heartbeats
    ) -> None:
        """``signal_node`` sends to every process of a node, and says to how many."""
        self._cases = [_Armed(each) for each in asked]
        self._signal_node = signal_node
        self._heartbeats = heartbeats
        self._starts: dict[int, float] = {}

    def check(self, local_world_sizes: Sequence[int]) -> None:
        """See that all exist to whom something is to happen, now that all agents have said how many workers they run.

        Raises:
            UsageError: a rank or a node that does not.
        """
        injections.check([case.injection for case in self._cases], sum(local_world_sizes), len(local_world_sizes))

    def hear(self, node: Node, event: object) -> None:
        """Take what a node's agent says."""
        match event:
            case AttemptStarted():
                self._starts.setdefault(event.attempt, time.monotonic())
                for case in self._cases:
                    if case.injection.attempt == event.attempt and _is_meant(case.injection, event):
                        self._arm(case, node, event.first_rank)
            case AttemptEnded(result=result):
                self._disarm(node, result.attempt)
            case LineSeen(number=number):
                self._seen(self._cases[number], node)
            case Inflicted(number=number, happened=True):
                self._happened(self._cases[number])
            case AgentLost():
                self._disarm(node, None)

    def _arm(self, case: _Armed, node: Node, first_rank: int) -> None:
        case.node, case.host = node, node.host
        case.local_rank = (case.injection.rank or 0) - first_rank
        case.started_s = time.monotonic()
        is_due = case.injection.after_line is None or node.index in case.seen_on
        case.due = case.started_s + case.injection.after_s if is_due else _NEVER

    def _seen(self, case: _Armed, node: Node) -> None:
        case.seen_on.add(node.index)
        if case.node is node and case.asked_s is None:
            case.due = time.monotonic()

    def _disarm(self, node: Node, attempt: int | None) -> None:
        for case in self._cases:
            if case.node is node and attempt in (None, case.injection.attempt):
                case.due = _NEVER

    def act(self) -> float:
        """Do what is due by now. Returns when there is more to do (``time.monotonic()``)."""
        now = time.monotonic()
        for number, case in enumerate(self._cases):
            if case.due <= now and case.node:
                case.due, case.asked_s = _NEVER, now
                self._do(number, case, case.node)
            if case.heals <= now:
                self._heal(case)
        return min((min(case.due, case.heals) for case in self._cases), default=_NEVER)

    def _do(self, number: int, case: _Armed, node: Node) -> None:
        each = case.injection
        match each.what:
            case "crash agent":
                node.handle.kill()
                self._happened(case)
            case "lose":
                self._freeze(node.index)
                self._signal_node(node.index, signal.SIGKILL)
                self._happened(case)
            case "partition":
                self._freeze(node.index)
                case.heals = time.monotonic() + (_NEVER if each.for_s is None else each.for_s)
                # Pretended nodes do without, or a laptop that is busy would lose some.
                self._heartbeats.begin(node, time.monotonic())
                self._happened(case)
            case "slow":
                node.handle.send(Inflict(number, each.attempt, case.local_rank, factor=each.by))
            case _:
                signum = signal.SIGSTOP if each.what == "hang" else signal.SIGKILL
                node.handle.send(Inflict(number, each.attempt, case.local_rank, signum, each.code))

    def _happened(self, case: _Armed) -> None:
        case.happened_s = time.monotonic()

    def _freeze(self, index: int) -> None:
        """Stop all of a node as if at once: who is stopped can neither start a process nor see another's end."""
        counts = [0]
        while len(counts) < _ROUNDS and counts[-1] != (count := self._signal_node(index, signal.SIGSTOP)):
            counts.append(count)

    def _heal(self, case: _Armed) -> None:
        case.heals = _NEVER
        if case.node:
            self._signal_node(case.node.index, signal.SIGCONT)

    def release(self) -> None:
        """Let all go on that was cut off, so that it can be stopped; and let nothing more happen."""
        for case in self._cases:
            case.due = _NEVER
            if case.injection.what == "partition" and case.happened_s is not None:
                self._heal(case)

    def accounts(self, result: RunResult) -> tuple[Injected, ...]:
        """What became of each, in the order in which they were asked for; nothing where the job never ran."""
        return tuple(account(case, self._starts, result) for case in self._cases if self._starts)


def _is_meant(injection: Injection, event: AttemptStarted) -> bool:
    if injection.rank is None:
        return injection.node == event.node_rank
    return event.first_rank <= injection.rank < event.first_rank + len(event.pids)
