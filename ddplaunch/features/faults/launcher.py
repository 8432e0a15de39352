"""``--inject``: injects the faults of a dry run when they are due, and describes their effect at the end.

Runs in the launcher, in the main thread. The fault of a worker is injected by its agent, since a pid is reused only
after the agent has reaped the worker; the fault of a node is a signal to all processes with the node's tag. Two
things differ from real machines: the processes of a killed node close their connections, which those of a machine
without power do not; and the processes of a partitioned node are suspended, where real ones continue until they need
another node.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.features.faults import fault_spec
from ddplaunch.features.faults.fault_spec import FaultSpec
from ddplaunch.features.faults.records import FaultInjected, InjectFault
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher import setup
from ddplaunch.launcher.nodes import Node
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol import environment
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted, Output
from ddplaunch.protocol.output_runs import runs_of
from ddplaunch.protocol.run_result import Injected, RunResult
from ddplaunch.system import procfs
from ddplaunch.transport.handle import ChannelClosed, WriteOutput, node_tag

if TYPE_CHECKING:
    from ddplaunch.protocol.results import AttemptResult

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
        is_partition: it is a partition that has not ended.
        seen_on: display names of the nodes on which a worker has printed the line of ``after_line``.
    """

    spec: FaultSpec
    host: str = ""
    started_at: float | None = None
    tried_at: float | None = None
    injected_at: float | None = None
    node: Node | None = None
    local_rank: int = 0
    due_at: float = NEVER
    heal_at: float = NEVER
    is_partition: bool = False
    seen_on: set[str] = field(default_factory=set)


class Injector(Watch):
    """All faults of a run."""

    def __init__(self, run: RunServices) -> None:
        self._run = run
        self._faults = [Fault(fault_spec.parse(text)) for text in run.config.injections]
        self._attempt_starts: dict[int, float] = {}

    def on_nodes_ready(self, workers: Mapping[str, int]) -> None:
        """Check the ranks and nodes of all faults against the workers that the nodes run.

        Raises:
            UsageError: a rank or a node does not exist.
        """
        fault_spec.check([fault.spec for fault in self._faults], sum(workers.values()), len(workers))

    def on_output(self, write: WriteOutput) -> WriteOutput:
        """Search the output for the lines of the faults that wait for one."""
        post = self._run.post
        on_line = lambda number, host: post(partial(self._on_line_seen, self._faults[number], host))  # noqa: E731
        return with_line_search([fault.spec for fault in self._faults], write, on_line)

    def on_event(self, index: int, event: object) -> None:
        """Follow the attempts and injected faults of node ``index``."""
        node = self._run.nodes.all[index]
        match event:
            case AttemptStarted():
                self._attempt_starts.setdefault(event.attempt, time.monotonic())
                for fault in self._faults:
                    if fault.spec.attempt == event.attempt and _concerns(fault.spec, event):
                        self._arm(fault, node, event.first_rank)
            case AttemptEnded(result=result):
                self._disarm(node, result.attempt)
            case FaultInjected(number=number):
                for fault in self._faults[number : number + 1]:
                    if fault.node is node and fault.tried_at is not None:  # Otherwise it was not asked to.
                        fault.injected_at = time.monotonic()
            case ChannelClosed():
                self._disarm(node, None)

    def _arm(self, fault: Fault, node: Node, first_rank: int) -> None:
        fault.node, fault.host = node, node.host
        fault.local_rank = (fault.spec.rank or 0) - first_rank
        fault.started_at = time.monotonic()
        is_due = fault.spec.after_line is None or node.host in fault.seen_on
        fault.due_at = fault.started_at + fault.spec.after_s if is_due else NEVER

    def _on_line_seen(self, fault: Fault, host: str) -> None:
        fault.seen_on.add(host)
        if fault.node and fault.host == host and fault.tried_at is None:
            fault.due_at = time.monotonic()

    def _disarm(self, node: Node, attempt: int | None) -> None:
        """Do not inject the faults of ``node`` in ``attempt`` any more; None: in any attempt."""
        for fault in self._faults:
            if fault.node is node and attempt in (None, fault.spec.attempt):
                fault.due_at = NEVER

    def run_due(self, now: float) -> float:
        """Inject the faults that are due, and end partitions, all if the run stops. Returns when to call again."""
        if self._run.shutdown.in_progress:
            self._release()
        for number, fault in enumerate(self._faults):
            if fault.due_at <= now and fault.node:
                fault.due_at, fault.tried_at = NEVER, now
                self._inject(number, fault, fault.node)
            if fault.heal_at <= now:
                self._heal(fault)
        return min((min(fault.due_at, fault.heal_at) for fault in self._faults), default=NEVER)

    def _inject(self, number: int, fault: Fault, node: Node) -> None:
        spec = fault.spec
        match spec.kind:
            case "crash agent":
                node.handle.kill()
                fault.injected_at = time.monotonic()
            case "lose":
                self._freeze(node.index)
                self._signal_node(node.index, signal.SIGKILL)
                fault.injected_at = time.monotonic()
            case "partition":
                self._freeze(node.index)
                fault.is_partition = True
                fault.heal_at = time.monotonic() + (NEVER if spec.for_s is None else spec.for_s)
                # In a dry run only partitioned nodes get pings: on a busy laptop other nodes would count as lost.
                self._run.pings.watch(node, time.monotonic())
                fault.injected_at = time.monotonic()
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
        fault.heal_at, fault.is_partition = NEVER, False
        if fault.node:
            self._signal_node(fault.node.index, signal.SIGCONT)

    def _signal_node(self, index: int, signum: int) -> int:
        """Send a signal to every process of a simulated node, its agent included. Returns their number."""
        tag = node_tag(self._run.run_tag, setup.node_names(self._run.config), index)
        return len(procfs.signal_all(f"{environment.RUN_ID}={tag}", signum))

    def _release(self) -> None:
        """Inject no more faults, and end all partitions, so that the nodes can be stopped."""
        for fault in self._faults:
            fault.due_at = NEVER
            if fault.is_partition:
                self._heal(fault)

    def add_to_result(self, result: RunResult) -> RunResult:
        """Add the effect of each fault, in the order of the options, if an attempt has started."""
        if not self._attempt_starts:
            return result
        effects = tuple(describe_effect(fault, self._attempt_starts, result) for fault in self._faults)
        return replace(result, injections=effects)


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


_KEPT_BYTES = 1 << 16
"""Bytes kept of an unfinished line: the searched text may arrive in two chunks."""


def with_line_search(
    faults: Sequence[FaultSpec], write: WriteOutput, on_line: Callable[[int, str], object]
) -> WriteOutput:
    """``write``, preceded by a search for the lines of ``faults``.

    ``on_line``: a worker has printed the line of the fault with this number, in its attempt, on this host. It is called
    once for each host.
    """
    searched = [
        (number, fault, os.fsencode(fault.after_line)) for number, fault in enumerate(faults) if fault.after_line
    ]
    seen: set[tuple[int, str]] = set()
    unfinished: dict[tuple[int, int, str], bytes] = {}

    def output(header: Output, data: bytes) -> None:
        for run in runs_of(header, data):
            search(*run)
        write(header, data)

    def search(header: Output, data: bytes) -> None:
        key = (header.attempt, header.rank, header.stream)
        text = unfinished.pop(key, b"") + data
        if rest := text[text.rfind(b"\n") + 1 :]:
            unfinished[key] = rest[-_KEPT_BYTES:]
        for number, fault, needle in searched:
            matches = fault.attempt == header.attempt and fault.rank in (None, header.rank)
            if matches and needle in text and (number, header.host) not in seen:
                seen.add((number, header.host))
                on_line(number, header.host)

    return output if searched else write


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (Injector(run),)
