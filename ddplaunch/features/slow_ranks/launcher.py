"""Looks for the rank that all others wait for: samples of all nodes about once a minute, and one warning for each rank.

Runs in the launcher, in the main thread, but for the arithmetic, which may take a second for thousands of ranks: a
short-lived thread does that. Must not end anything, nor compare the clocks of two hosts (see
``slow_ranks.slow_ranks``).

The launcher asks all nodes at the same time, so that the newest calls of their workers are about the same collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.features.hangs.examinations import Question
from ddplaunch.features.slow_ranks.records import CollectivesSampled, RankLoad, SampleCollectives
from ddplaunch.launcher.watches import RunEnd, RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.text import median, size
from ddplaunch.threads import post_from_thread

if TYPE_CHECKING:
    from ddplaunch.features.slow_ranks.slow_ranks import ClockLimits, LatenessCounts
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.run_result import RankLateness, RunResult

_FIRST_S, _PERIOD_S = 30.0, 60.0
_PERIOD_PER_COST = 400.0
"""The next sample follows after so many times what the last has cost in a worker: at most 0.25 % of its time."""

_ANSWER_S = 15.0
_MIN_SAMPLES = 2
"""Samples before a judgement: one alone may fall into a few slow seconds."""

_CPU_WAIT, _CPU_USE = 0.05, 0.05
"""A cause is named if the rank exceeds the middle of the others by this share of the time."""

_IO_PER_S = 1 << 20
_IO_FACTOR = 2
"""Reading is named from so many bytes a second on, if that is so much more than the others."""


class SlowRanksWatch(Watch):
    """Watches one run. Nothing is sampled with ``--hang-report off``, or before the workers have process groups."""

    def __init__(self, run: RunServices) -> None:
        self._is_on = run.config.timeouts.hang_report_s is not None
        self._send, self._post = run.send_to_all, run.post
        self._show = partial(run.messages.show, kind="slow_rank")
        self._attempt, self._number = -1, 0
        self._participants: Sequence[int] = ()
        self._due = NEVER
        self._sample: Question | None = None
        """It counts only if all nodes have answered."""
        self._asked_ns = 0
        """``time.monotonic_ns()`` before the question."""
        self._clocks: dict[str, ClockLimits] = {}
        """Of each host that has looked at its clock since then."""
        self._newest: dict[str, int] = {}
        self._total: LatenessCounts | None = None  # Until there is a process group: many jobs have none.
        self._recent: LatenessCounts
        self._recent_hosts: LatenessCounts
        self._suspects: tuple[int, ...] = ()
        self._warnings: dict[int | str, str] = {}
        """By rank or host."""

    # Samples.

    def on_report(self, node_index: int, participants: Sequence[int], report: Report) -> None:
        """Node ``node_index`` has answered, or its workers have a process group; ``participants`` are all nodes."""
        if not isinstance(report, CollectivesSampled):
            return
        self._participants = participants
        if report.is_debugged:  # A rank that is debugged is late, and so are those that wait for the debugger.
            self._is_on, self._due, self._sample = False, NEVER, None
        if self._is_on and not report.number and report.attempt > self._attempt:
            self._start_attempt(report.attempt)
        sample = self._sample
        if sample is None or report.number != sample.number:
            return
        if report.clock_ns:
            self._clocks[report.host] = report.clock_ns - time.monotonic_ns(), report.clock_ns - self._asked_ns
        elif sample.take(node_index, participants, report):
            self._evaluate(sample)

    def _start_attempt(self, attempt: int) -> None:
        self._attempt, self._sample, self._newest = attempt, None, {}
        self._due = time.monotonic() + _FIRST_S
        self._forget()

    def _forget(self) -> None:
        from ddplaunch.features.slow_ranks.slow_ranks import LatenessCounts

        self._total = self._total or LatenessCounts()
        self._recent, self._recent_hosts = LatenessCounts(), LatenessCounts()

    def run_due(self, now: float) -> float:
        """Ask the nodes if it is time. Returns when to call again."""
        if self._sample and now >= self._sample.deadline:  # A node is lost, or has ended its part.
            self._sample = None
        if now >= self._due:
            self._number += 1
            self._sample = Question(self._number, self._attempt, now + _ANSWER_S, set(self._participants))
            self._asked_ns, self._clocks = time.monotonic_ns(), {}
            self._due = now + _PERIOD_S
            self._send(SampleCollectives(self._attempt, self._number, self._suspects))
        return min(self._due, self._sample.deadline if self._sample else NEVER)

    def _evaluate(self, sample: Question) -> None:
        self._sample = None
        answers = sample.answers.values()
        cost_s = max(answer.cost_s for answer in answers)
        self._due = max(self._due, time.monotonic() + _PERIOD_PER_COST * cost_s)
        from ddplaunch.features.slow_ranks import slow_ranks

        newest, clocks = dict(self._newest), self._clocks

        def run() -> Callable[[], None]:
            return partial(self._judge, sample, *slow_ranks.window(answers, newest, clocks))

        # Without room for a thread the sample does not count, and the job goes on.
        post_from_thread("slow ranks", run, self._post, otherwise=lambda: None)

    # Judgement.

    def _judge(
        self, sample: Question, of_ranks: LatenessCounts, of_hosts: LatenessCounts, newest: dict[str, int]
    ) -> None:
        """Count a sample, and warn if there is enough to tell which rank is slow."""
        from ddplaunch.features.slow_ranks import slow_ranks

        if self._total:
            self._total.add(of_ranks)
        if sample.attempt != self._attempt or sample.number != self._number:
            return
        self._newest.update(newest)
        self._recent.add(of_ranks)
        self._recent_hosts.add(of_hosts)
        lateness, hosts = self._recent.lateness(), self._recent_hosts.lateness()
        slow, slow_host = slow_ranks.suspect(lateness), slow_ranks.suspect(hosts)
        suspect = slow or slow_host
        self._suspects = (suspect.rank,) if suspect else ()
        if self._recent.samples >= _MIN_SAMPLES and slow_ranks.is_enough(lateness):
            self._forget()
            loads = [load for answer in sample.answers.values() for load in answer.loads]
            if slow:
                self._warn(slow.rank, slow_ranks.warning(lateness, reason(slow.rank, loads)))
            elif slow_host:  # Its other ranks have the same reason.
                alike = {each.rank for each in lateness if each.host == slow_host.host} - {slow_host.rank}
                why = reason(slow_host.rank, [load for load in loads if load.rank not in alike])
                self._warn(slow_host.host, slow_ranks.warning(hosts, why, of_hosts=True))

    def _warn(self, of: int | str, text: str) -> None:
        """Warn of a rank or a host, once."""
        if text and of not in self._warnings:
            self._warnings[of] = text
            self._show(text, Level.NORMAL)

    # The end of the run.

    def add_to_result(self, result: RunResult) -> RunResult:
        """Add the lateness of all ranks."""
        return replace(result, collectives=self.lateness())

    def lateness(self) -> tuple[RankLateness, ...]:
        """The figures of the whole run, the most expensive rank first."""
        return tuple(
            replace(each, warning=self._warnings.get(each.rank) or self._warnings.get(each.host, ""))
            for each in (self._total.lateness() if self._total else ())
        )

    def report_lines(self, result: RunResult) -> Sequence[str]:
        """Which ranks cost the most."""
        if not result.collectives:
            return ()
        from ddplaunch.features.slow_ranks import slow_ranks

        title = "Which rank was last in collectives (the job's cost, in the samples that were taken):"
        return ("", title, *slow_ranks.lateness_table(result.collectives))

    def on_run_ended(self, end: RunEnd) -> None:
        """With ``--verbose``, show the rank that cost the most. A failed run has those that did in report.txt."""
        if end.result.collectives:
            from ddplaunch.features.slow_ranks import slow_ranks

            self._show(slow_ranks.summary(end.result.collectives), Level.VERBOSE)


# Why a rank is slower than the others, as far as the kernel's counters and its GPU tell.


def reason(rank: int, loads: Sequence[RankLoad]) -> str:
    """What distinguishes ``rank`` from the others, as ``it waits for a CPU``; empty if nothing does."""
    own = next((load for load in loads if load.rank == rank and load.window_s > 0), None)
    others = [load for load in loads if load.rank != rank and load.window_s > 0]
    if own is None:
        return ""
    if own.throttled:
        return f"its GPU is throttled: {own.throttled}"
    if not others:
        return ""
    if _excess(own, others, lambda load: load.run_queue_wait_s) > _CPU_WAIT:
        return "it waits for a CPU"
    io, usual = _rate(own), median(map(_rate, others))
    if io > max(_IO_PER_S, _IO_FACTOR * usual):
        return f"it reads or writes {size(io)}/s, the others {size(usual)}/s"
    if _excess(own, others, lambda load: load.cpu_s) > _CPU_USE:
        return "it computes more than the others on the CPU"
    return ""


def _excess(own: RankLoad, others: Sequence[RankLoad], seconds: Callable[[RankLoad], float]) -> float:
    return seconds(own) / own.window_s - median(seconds(load) / load.window_s for load in others)


def _rate(load: RankLoad) -> float:
    return load.io_bytes / load.window_s


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (SlowRanksWatch(run),)
