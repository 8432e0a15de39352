"""``--inject``: injects the faults of a dry run when they are due, and describes their effect at the end.

Runs in the launcher, in the main thread. The fault of a worker is injected by its agent, since a pid is reused only
after the agent has reaped the worker; the fault of a node is a signal to all processes with the node's tag. Two
things differ from real machines: the processes of a killed node close their connections, which those of a machine
without power do not; and the processes of a partitioned node are suspended, where real ones continue until they need
another node.
"""

from __future__ import annotations

import signal
import time
from dataclasses import field
from typing import TYPE_CHECKING

from ddplaunch.features.faults import fault_spec
from ddplaunch.features.faults.fault_spec import FaultSpec
from ddplaunch.features.faults.records import FaultInjected, InjectFault
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher.nodes import Node
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted
from ddplaunch.protocol.results import Injected
from ddplaunch.transport.handle import ChannelClosed
from ddplaunch.transport.local import LineSeen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddplaunch.launcher.pings import Pings
    from ddplaunch.protocol.results import AttemptResult, RunResult

_NEVER = float("inf")
_MAX_PASSES = 20
"""Limit of the repeated searches for new processes of a node that is being suspended."""


@dataclass
class Fault:
    """One fault and its progress. Times are ``time.monotonic()``'s; None: not yet.

    Attributes:
        host: display name of the node of the fault; empty until the fault's attempt runs.
        started_at: when the attempt started on that node.
        tried_at: when the fault was due and the injection began.
        injected_at: when the fault was injected.
        node: the node of the fault; None until the fault's attempt runs.
        local_rank: local rank of the worker in that attempt.
        due_at: when to inject the fault.
        heal_at: when to end a partition.
        seen_on: indices of the nodes on which a worker has printed the line of ``after_line``.
    """

    spec: FaultSpec
    host: str = ""
    started_at: float | None = None
    tried_at: float | None = None
    injected_at: float | None = None
    node: Node | None = None
    local_rank: int = 0
    due_at: float = _NEVER
    heal_at: float = _NEVER
    seen_on: set[int] = field(default_factory=set)

    def set_injected(self) -> None:
        """The fault has been injected now."""
        self.injected_at = time.monotonic()


class Injector:
    """All faults of a run."""

    def __init__(self, specs: Sequence[FaultSpec], signal_node: Callable[[int, int], int], pings: Pings) -> None:
        """``signal_node(index, signum)`` sends a signal to every process of a node and returns their number."""
        self._faults = [Fault(spec) for spec in specs]
        self._signal_node = signal_node
        self._pings = pings
        self._attempt_starts: dict[int, float] = {}

    def check(self, local_world_sizes: Sequence[int]) -> None:
        """Check the ranks and nodes of all faults against the workers that the nodes run.

        Raises:
            UsageError: a rank or a node does not exist.
        """
        fault_spec.check([fault.spec for fault in self._faults], sum(local_world_sizes), len(local_world_sizes))

    def on_event(self, node: Node, event: object) -> None:
        """Follow the attempts, lines and injected faults of ``node``."""
        match event:
            case AttemptStarted():
                self._attempt_starts.setdefault(event.attempt, time.monotonic())
                for fault in self._faults:
                    if fault.spec.attempt == event.attempt and _concerns(fault.spec, event):
                        self._arm(fault, node, event.first_rank)
            case AttemptEnded(result=result):
                self._disarm(node, result.attempt)
            case LineSeen(number=number):
                self._on_line_seen(self._faults[number], node)
            case FaultInjected(number=number, happened=True):
                for fault in self._faults[number : number + 1]:
                    if fault.node is node and fault.tried_at is not None:  # Otherwise it was not asked to.
                        fault.set_injected()
            case ChannelClosed():
                self._disarm(node, None)

    def _arm(self, fault: Fault, node: Node, first_rank: int) -> None:
        fault.node, fault.host = node, node.host
        fault.local_rank = (fault.spec.rank or 0) - first_rank
        fault.started_at = time.monotonic()
        is_due = fault.spec.after_line is None or node.index in fault.seen_on
        fault.due_at = fault.started_at + fault.spec.after_s if is_due else _NEVER

    def _on_line_seen(self, fault: Fault, node: Node) -> None:
        fault.seen_on.add(node.index)
        if fault.node is node and fault.tried_at is None:
            fault.due_at = time.monotonic()

    def _disarm(self, node: Node, attempt: int | None) -> None:
        """Do not inject the faults of ``node`` in ``attempt`` any more; None: in any attempt."""
        for fault in self._faults:
            if fault.node is node and attempt in (None, fault.spec.attempt):
                fault.due_at = _NEVER

    def run_due(self, now: float) -> float:
        """Inject the faults that are due, and end partitions. Returns when to call again."""
        for number, fault in enumerate(self._faults):
            if fault.due_at <= now and fault.node:
                fault.due_at, fault.tried_at = _NEVER, now
                self._inject(number, fault, fault.node)
            if fault.heal_at <= now:
                self._heal(fault)
        return min((min(fault.due_at, fault.heal_at) for fault in self._faults), default=_NEVER)

    def _inject(self, number: int, fault: Fault, node: Node) -> None:
        spec = fault.spec
        match spec.kind:
            case "crash agent":
                node.handle.kill()
                fault.set_injected()
            case "lose":
                self._freeze(node.index)
                self._signal_node(node.index, signal.SIGKILL)
                fault.set_injected()
            case "partition":
                self._freeze(node.index)
                fault.heal_at = time.monotonic() + (_NEVER if spec.for_s is None else spec.for_s)
                # In a dry run only partitioned nodes get pings: on a busy laptop other nodes would count as lost.
                self._pings.watch(node, time.monotonic())
                fault.set_injected()
            case "slow":
                node.handle.send(InjectFault(number, spec.attempt, fault.local_rank, factor=spec.by))
            case _:
                signum = signal.SIGSTOP if spec.kind == "hang" else signal.SIGKILL
                node.handle.send(InjectFault(number, spec.attempt, fault.local_rank, signum, spec.code))

    def _freeze(self, index: int) -> None:
        """Suspend all processes of a node; repeated until no new ones are found: a process may fork meanwhile."""
        counts = [0]
        while len(counts) < _MAX_PASSES and counts[-1] != (count := self._signal_node(index, signal.SIGSTOP)):
            counts.append(count)

    def _heal(self, fault: Fault) -> None:
        fault.heal_at = _NEVER
        if fault.node:
            self._signal_node(fault.node.index, signal.SIGCONT)

    def release(self) -> None:
        """Inject no more faults, and end all partitions, so that the nodes can be stopped."""
        for fault in self._faults:
            fault.due_at = _NEVER
            if fault.spec.kind == "partition" and fault.injected_at is not None:
                self._heal(fault)

    def describe_effects(self, result: RunResult) -> tuple[Injected, ...]:
        """The effect of each fault, in the order of the options; empty if no attempt has started."""
        if not self._attempt_starts:
            return ()
        return tuple(describe_effect(fault, self._attempt_starts, result) for fault in self._faults)


def _concerns(spec: FaultSpec, event: AttemptStarted) -> bool:
    """Whether the fault's rank or node is one of those that have started."""
    if spec.rank is None:
        return spec.node == event.node_rank
    return event.first_rank <= spec.rank < event.first_rank + len(event.pids)


def describe_effect(fault: Fault, attempt_starts: Mapping[int, float], result: RunResult) -> Injected:
    """The effect of one fault. ``attempt_starts`` is when each attempt started, by ``time.monotonic()``."""
    spec = fault.spec
    if fault.injected_at is None or fault.started_at is None:
        return Injected(spec.text, None, f"did not happen: {_why_not(fault, attempt_starts, result)}")
    after_s = fault.injected_at - fault.started_at
    effect = f"{fault_spec.effect(spec, fault.host)} {after_s:.1f} s into attempt {spec.attempt}"
    reaction = _reaction(spec.attempt, fault.injected_at, attempt_starts, result)
    return Injected(spec.text, after_s, f"{effect}; {reaction}")


def _why_not(fault: Fault, attempt_starts: Mapping[int, float], result: RunResult) -> str:
    spec, number = fault.spec, fault.spec.attempt
    attempt = _attempt(number, result)
    target = f"node {spec.node}" if spec.rank is None else f"rank {spec.rank}"
    if fault.started_at is None:
        return f"attempt {number} had no {target}" if number in attempt_starts else f"there was no attempt {number}"
    if fault.tried_at is not None:
        return f"{target} had already ended"
    if spec.after_line is not None:
        return f"no such line reached the console from {target} in attempt {number}"
    if attempt:
        return f"attempt {number} was over after {attempt.duration_s:.1f} s"
    return f"{fault.host} was already lost"


def _attempt(number: int, result: RunResult) -> AttemptResult | None:
    return next((attempt for attempt in result.attempts if attempt.attempt == number), None)


def _reaction(number: int, injected_at: float, attempt_starts: Mapping[int, float], result: RunResult) -> str:
    """How the job continued after a fault in attempt ``number``."""
    if result.outcome == "stopped" and result.signal:
        outcome = f"the job was stopped by {result.signal}"
    else:
        outcome = (
            f"the job {'succeeded' if result.outcome == 'succeeded' else f'ended with exit code {result.exit_code}'}"
        )
    next_number = min((later for later in attempt_starts if later > number), default=None)
    if next_number is not None:
        return f"attempt {next_number} ran {attempt_starts[next_number] - injected_at:.2f} s later, and {outcome}"
    attempt = _attempt(number, result)
    if attempt and attempt.outcome == "succeeded" and result.outcome == "succeeded":
        return f"the attempt continued, and {outcome}"
    return outcome
