"""Looks for the rank that all others wait for: samples of all nodes about once a minute, and one warning for each rank.

Runs in the launcher, in the main thread, but for the arithmetic, which may take a second for thousands of ranks: a
short-lived thread posts its result. Must not end anything, nor compare the clocks of two hosts (see
``hangs.slow_ranks``).

The launcher asks all nodes at the same time, so that the newest calls of their workers are about the same collectives.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.features.slow_ranks.records import CollectivesSampled, SampleCollectives
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher.watches import Watch
from ddplaunch.protocol.launcher_agent import OrderToNodes, ReportOfNode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.slow_ranks.records import RankLoad
    from ddplaunch.features.slow_ranks.slow_ranks import ClockLimits, LatenessCounts, Window  # noqa: TC004 - not looked up.
    from ddplaunch.launcher.watches import RunEnd, RunServices
    from ddplaunch.protocol.results import RankLateness, RunResult

_NEVER = float("inf")
_FIRST_S, _PERIOD_S = 30.0, 60.0
_PERIOD_PER_COST = 400.0
"""The next sample follows after so many times what the last has cost in a worker: at most 0.25 % of its time."""

_ANSWER_S = 15.0
_MIN_WINDOWS = 2
"""Samples before a judgement: one alone may fall into a few slow seconds."""


@dataclass
class _Sample:
    """One question to all nodes; it counts only if all have answered before ``deadline``.

    Attributes:
        asked_ns: ``time.monotonic_ns()`` before the question.
        clocks: of each host that has looked at its clock since then.
    """

    number: int
    deadline: float
    missing: set[int]
    asked_ns: int = field(default_factory=time.monotonic_ns)
    clocks: dict[str, ClockLimits] = field(default_factory=dict)
    answers: list[CollectivesSampled] = field(default_factory=list)


@dataclass(frozen=True)
class SampleJudged:
    """Event: a thread has evaluated the sample ``number`` of ``attempt``."""

    attempt: int
    number: int
    window: Window


class SlowRanksWatch(Watch):
    """Watches one run. Nothing is sampled with ``--hang-report off``, or before the workers have process groups."""

    def __init__(
        self,
        config: LaunchConfig,
        send: Callable[[object], None],
        show: Callable[[str, int], None],
        post: Callable[[object], None],
    ) -> None:
        """``send`` sends to all nodes of this launcher; ``post`` posts an event to it, from any thread."""
        self._is_on = config.timeouts.hang_report_s is not None
        self._send = (lambda order: send(OrderToNodes(order))) if config.rendezvous else send
        self._show, self._post = show, post
        self._attempt, self._number = -1, 0
        self._participants: Sequence[int] = ()
        self._due = _NEVER
        self._sample: _Sample | None = None
        self._newest: dict[str, int] = {}
        self._loads: list[RankLoad] = []
        self._total: LatenessCounts | None = None  # Until there is a process group: many jobs have none.
        self._recent: LatenessCounts
        self._recent_hosts: LatenessCounts
        self._suspects: tuple[int, ...] = ()
        self._warnings: dict[int, str] = {}
        self._host_warnings: dict[str, str] = {}

    # Samples.

    def on_event(self, index: int, participants: Sequence[int], event: object) -> None:
        """An event of node ``index``; ``participants`` are the nodes of this launcher. Other events have no effect."""
        match event:
            case CollectivesSampled():
                self.on_report(index, participants, event)
            case ReportOfNode(report=CollectivesSampled() as report):
                self.on_report(event.node_index, event.participants, report)

    def on_report(self, index: int, participants: Sequence[int], report: CollectivesSampled) -> None:
        """Node ``index`` has answered, or its workers have a process group; ``participants`` are all nodes."""
        self._participants = participants
        if report.is_debugged:  # A rank that is debugged is late, and so are those that wait for the debugger.
            self._is_on, self._due, self._sample = False, _NEVER, None
        if self._is_on and not report.number and report.attempt > self._attempt:
            self._start_attempt(report.attempt)
        sample = self._sample
        if sample and (report.attempt, report.number) == (self._attempt, sample.number) and index in sample.missing:
            if report.clock_ns:
                limits = report.clock_ns - time.monotonic_ns(), report.clock_ns - sample.asked_ns
                sample.clocks[report.host] = limits
                return
            sample.missing.discard(index)
            sample.answers.append(report)
            if not sample.missing:
                self._evaluate(sample)

    def _start_attempt(self, attempt: int) -> None:
        self._attempt, self._sample, self._newest = attempt, None, {}
        self._due = time.monotonic() + _FIRST_S
        self._forget()

    def _forget(self) -> None:
        from ddplaunch.features.slow_ranks.slow_ranks import LatenessCounts

        self._total = self._total or LatenessCounts()
        self._recent, self._recent_hosts = LatenessCounts(), LatenessCounts(of_hosts=True)

    def run_due(self, now: float) -> float:
        """Ask the nodes if it is time. Returns when to call again."""
        if self._sample and now >= self._sample.deadline:  # A node is lost, or has ended its part.
            self._sample = None
        if now >= self._due:
            self._number += 1
            self._sample = _Sample(self._number, now + _ANSWER_S, set(self._participants))
            self._due = now + _PERIOD_S
            self._send(SampleCollectives(self._attempt, self._number, self._suspects))
        return min(self._due, self._sample.deadline if self._sample else _NEVER)

    def _evaluate(self, sample: _Sample) -> None:
        self._sample = None
        cost_s = max(answer.cost_s for answer in sample.answers)
        self._due = max(self._due, time.monotonic() + _PERIOD_PER_COST * cost_s)
        self._loads = [load for answer in sample.answers for load in answer.loads]
        from ddplaunch.features.slow_ranks import call_times, slow_ranks

        attempt, newest, post = self._attempt, dict(self._newest), self._post

        def run() -> None:
            times = [call_times.unpack(each, answer.host) for answer in sample.answers for each in answer.times]
            post(SampleJudged(attempt, sample.number, slow_ranks.window(times, newest, sample.clocks)))

        with contextlib.suppress(RuntimeError):  # No room for a thread: the sample does not count, the job goes on.
            threading.Thread(target=run, name="slow ranks", daemon=True).start()

    # Judgement.

    def on_posted(self, event: object) -> bool:
        """Handle the thread's result."""
        if isinstance(event, SampleJudged):
            self.on_judged(event)
        return isinstance(event, SampleJudged)

    def on_judged(self, event: SampleJudged) -> None:
        """Count a sample, and warn if there is enough to tell which rank is slow."""
        from ddplaunch.features.slow_ranks import slow_ranks

        if self._total:
            self._total.add(event.window)
        if event.attempt != self._attempt or event.number != self._number:
            return
        self._newest.update(event.window.newest)
        self._recent.add(event.window)
        self._recent_hosts.add(event.window)
        lateness, hosts = self._recent.lateness(), self._recent_hosts.lateness()
        slow, slow_host = slow_ranks.suspect(lateness), slow_ranks.suspect(hosts)
        suspect = slow or slow_host
        self._suspects = (suspect.rank,) if suspect else ()
        if self._recent.windows >= _MIN_WINDOWS and slow_ranks.is_enough(lateness):
            self._forget()
            if slow:
                self._warn(slow.rank, lateness)
            elif slow_host:
                alike = {each.rank for each in lateness if each.host == slow_host.host} - {slow_host.rank}
                self._warn_of_host(slow_host, hosts, alike)

    def _warn(self, rank: int, lateness: Sequence[RankLateness]) -> None:
        from ddplaunch.features.slow_ranks.slow_ranks import warning
        from ddplaunch.features.slow_ranks.slow_reason import reason

        text = warning(lateness, reason(rank, self._loads))
        if text and rank not in self._warnings:
            self._warnings[rank] = text
            self._show(text, Level.NORMAL)

    def _warn_of_host(self, slow: RankLateness, lateness: Sequence[RankLateness], alike: set[int]) -> None:
        """``alike`` are the other ranks of the host, which have the same reason."""
        from ddplaunch.features.slow_ranks.slow_ranks import host_warning
        from ddplaunch.features.slow_ranks.slow_reason import reason

        loads = [load for load in self._loads if load.rank not in alike]
        text = host_warning(lateness, reason(slow.rank, loads))
        if text and slow.host not in self._host_warnings:
            self._host_warnings[slow.host] = text
            self._show(text, Level.NORMAL)

    # The end of the run.

    def on_agents_ended(self, result: RunResult) -> RunResult:
        """Add the lateness of all ranks."""
        return replace(result, collectives=self.lateness())

    def lateness(self) -> tuple[RankLateness, ...]:
        """The figures of the whole run, the most expensive rank first."""
        return tuple(
            replace(each, warning=self._warnings.get(each.rank) or self._host_warnings.get(each.host, ""))
            for each in (self._total.lateness() if self._total else ())
        )

    def report_lines(self, result: RunResult) -> Sequence[str]:
        """The ranks for which the others waited the most."""
        if not result.collectives:
            return ()
        from ddplaunch.features.slow_ranks import slow_ranks

        title = "Which rank was last in collectives (the job's cost, in the samples that were taken):"
        return ["", title, *slow_ranks.lateness_table(result.collectives)]

    def on_run_ended(self, end: RunEnd) -> None:
        """With ``--verbose``, show the rank that cost the most."""
        if end.result.collectives:
            from ddplaunch.features.slow_ranks import slow_ranks

            self._show(slow_ranks.summary(end.result.collectives), Level.VERBOSE)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    show = partial(run.messages.show, kind="slow_rank")
    return (SlowRanksWatch(run.config, run.nodes.send, show, run.post),)
