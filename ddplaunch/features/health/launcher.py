"""The health of all nodes of this launcher: shows findings, refuses nodes before their first attempt, compares nodes.

Runs in the launcher, in the main thread. Agents send one NodeHealth, and later findings. A refused node is replaced by
a spare, or the job starts with fewer nodes, or it does not start: then all refused nodes are named, so the decision
waits until all nodes have reported, for at most ``_COLLECT_S``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import HARDWARE, NODE_NOT_READY, LaunchError, Level
from ddplaunch.features.health import findings
from ddplaunch.features.health.records import HardwareOfNode, NodeHardware, NodeHealth
from ddplaunch.launcher.watches import RunEnd, RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.launcher_agent import AttemptStarted, Pong, Report
from ddplaunch.protocol.results import HealthFinding
from ddplaunch.text import plural

if TYPE_CHECKING:
    from ddplaunch.protocol.run_result import RunResult

_COLLECT_S = 3.0
_EXACT_S = 1.0
"""A clock that is known so exactly is not looked at again: it may be set while the job runs."""

_MAX_KEPT = 1000
"""Findings in the report of a run: a GPU may tell of many errors."""

_HINT = "Mend or drain these nodes, or add other hosts; --health warn uses them all the same."
_HINT_OF_CHECK = "Mend these nodes, or add other hosts; without --check-first they are used all the same."


class HealthWatch(Watch):
    """Watches one run."""

    def __init__(self, run: RunServices) -> None:
        self._config, self._is_on = run.config, run.config.health != "off"
        self._nodes, self._participants, self._shutdown = run.nodes, run.participants, run.shutdown
        self._show, self._note = run.messages.show, run.note
        self._reports: dict[int, NodeHealth] = {}
        self._first_ranks: dict[int, int] = {}
        self._refused: dict[int, list[HealthFinding]] = {}
        self._decide_by = NEVER
        self._comparison = _Comparison(run.messages.show)
        self._kept: list[HealthFinding] = []

    def add_to_result(self, result: RunResult) -> RunResult:
        """Add all findings."""
        return replace(result, health=tuple(self._kept))

    def on_run_ended(self, end: RunEnd) -> None:
        """Remember what is known of the nodes for the next runs."""
        attempts = end.result.attempts
        if end.lost or end.result.health or any(each.outcome == "failed" or each.cause for each in attempts):
            from ddplaunch.features.health import node_memory  # A run without a failure does not wait for the import.

            node_memory.remember(self._config, end.result, end.lost, self._show)

    # Events.

    def on_event(self, index: int, event: object) -> None:
        """An event of node ``index``. Other events have no effect."""
        match event:
            case AttemptStarted(first_rank=first_rank):
                self._first_ranks[index] = first_rank
            case HealthFinding():
                self._on_findings(index, (event,))
            case NodeHealth() if index not in self._reports:
                self._on_health(index, event)
            case Pong(ping_time_s=sent_s, time_s=time_s) if self._is_on and time_s:
                host = self._nodes.all[index].host
                self._comparison.on_clock(index, host, time_s - time.time(), time_s - sent_s)

    def on_report(self, node_index: int, participants: Sequence[int], report: Report) -> None:
        """What a node has, where another launcher knows it."""
        if isinstance(report, HardwareOfNode):
            self._comparison.on_hardware(node_index, report.host, report.hardware, participants)
            self._comparison.on_clock(node_index, report.host, report.clock_ahead_s, report.clock_ahead_s)

    def _on_health(self, index: int, report: NodeHealth) -> None:
        self._reports[index] = report
        wrong = findings.refused(report.findings, self._config.health)
        self._keep(index, wrong)
        if wrong and self._config.one_launcher_leads:  # Otherwise the agent ends by itself.
            self._refused[index] = wrong
            self._decide_by = min(self._decide_by, time.monotonic() + _COLLECT_S)
        self._on_findings(index, [finding for finding in report.findings if finding not in wrong])
        if self._config.one_launcher_leads:
            host, participants = self._nodes.all[index].host, self._participants.indices
            self._comparison.on_hardware(index, host, report.hardware, participants)

    def _on_findings(self, index: int, found: Iterable[HealthFinding]) -> None:
        self._keep(index, found)
        for finding in found:
            line = findings.line(finding, self._nodes.all[index].host, self._first_ranks.get(index))
            self._show(line, Level.ALWAYS)

    def _keep(self, index: int, findings: Iterable[HealthFinding]) -> None:
        host, first_rank = self._nodes.all[index].host, self._first_ranks.get(index)
        for finding in findings:
            facts = {"rule": finding.rule, "severity": finding.severity, "gpu": finding.gpu}
            self._note("health", finding.text, node=index, **facts)
            if len(self._kept) < _MAX_KEPT:
                ranks = () if first_rank is None else tuple(first_rank + local for local in finding.local_ranks)
                self._kept.append(replace(finding, host=host, time_s=time.time(), ranks=ranks))

    # Nodes that must not be used.

    def run_due(self, now: float) -> float:
        """Decide about the refused nodes, if it is time. Returns when to call again."""
        if not self._refused:
            return NEVER
        if now < self._decide_by and not self._reports.keys() >= set(self._participants.indices):
            return self._decide_by
        # A node may have been lost since it has reported.
        refused = {index: wrong for index, wrong in self._refused.items() if index in self._participants.indices}
        self._refused, self._decide_by = {}, NEVER
        if refused and not self._shutdown.in_progress:
            try:
                self._leave_out(refused)
            except LaunchError as error:
                self._shutdown.fail(error)
        return NEVER

    def _leave_out(self, refused: dict[int, list[HealthFinding]]) -> None:
        lines = {index: findings.refusal(refused[index], self._nodes.all[index].host) for index in sorted(refused)}
        if self._participants.dispensable_count < len(refused):
            remaining, needed = self._participants.remaining_and_needed(self._nodes.all[index] for index in refused)
            subject = findings.subject([finding for found in refused.values() for finding in found])
            table = "\n".join(f"  {line}" for line in lines.values())
            have = f"{plural(needed, 'node')} {'is' if needed == 1 else 'are'} needed, and {remaining} can be used"
            why = f"{have}\n{table}"
            text = f"logs cannot be written; {why}" if subject == "folder" else f"the hardware is not sound; {why}"
            if subject == "check":
                raise LaunchError(f"the check was not passed; {why}", _HINT_OF_CHECK, NODE_NOT_READY)
            raise LaunchError(text, _HINT, HARDWARE)
        for index, line in lines.items():
            self._show(f"not used: {line}", Level.ALWAYS)
            self._participants.leave(self._nodes.all[index])


class _Comparison:
    """Compares the hardware of the nodes, once all have told theirs, and their clocks with that of this machine.

    Where each node has a launcher, in that of the node that serves the rendezvous. Shows each difference once. A node
    that joins later is compared with the others.
    """

    def __init__(self, show: Callable[[str, int], None]) -> None:
        self._show = show
        self._known: dict[int, tuple[str, NodeHardware]] = {}
        self._is_compared = False
        self._has_clock: set[int] = set()

    def on_hardware(self, index: int, host: str, hardware: NodeHardware, participants: Sequence[int]) -> None:
        """Node ``index`` has told what it has; ``participants`` are all nodes of the job now."""
        if index in self._known:
            return
        self._known[index] = host, hardware
        if self._known.keys() >= set(participants):
            nodes = dict(self._known[other] for other in (*participants, index))
            for text in findings.between(nodes, host if self._is_compared else ""):
                self._show(text, Level.ALWAYS)
            self._is_compared = True

    def on_clock(self, index: int, host: str, least_s: float, most_s: float) -> None:
        """The clock of node ``index`` is ahead of this machine's by so many seconds at least, and at most."""
        if index in self._has_clock:
            return
        text = findings.clock_text(host, findings.certain_offset(least_s, most_s))
        if text:
            self._show(text, Level.ALWAYS)
        if text or most_s - least_s < _EXACT_S:
            self._has_clock.add(index)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    if run.config.check_first != "quick":
        return (HealthWatch(run),)
    from ddplaunch.features.health.passing import PassingHosts

    return (HealthWatch(run), PassingHosts(run))
