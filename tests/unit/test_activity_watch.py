"""For how long the workers of a node have been quiet, and what the agent asks them when."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ddplaunch.agent.events import AttemptFailure, OutputResumed
from ddplaunch.agent.workers.output import Stream
from ddplaunch.agent.workers.worker import Worker
from ddplaunch.features.hangs import activity_watch, sampler
from ddplaunch.features.hangs.activity_watch import ActivityWatch, Routes, WorkersSampled
from ddplaunch.features.hangs.records import (
    AbortHungAttempt,
    CollectiveCall,
    ExamineWorkers,
    FlightRecord,
    NodeEvidence,
    WorkerActivity,
    WorkersExamined,
)
from ddplaunch.features.hangs.sampler import Sample
from ddplaunch.protocol.launcher_agent import Output
from ddplaunch.system.process_activity import ProcessActivity
from ddplaunch.timeouts import TimeoutConfig
from tests.support.hangs import call

PID = 77


class Watched:
    """A watch of one worker, whose time and samples the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **timeouts: Any) -> None:
        self.now, self.cpu_s, self.status = 1000.0, 0.0, b""
        self.calls: tuple[CollectiveCall, ...] = ()
        monkeypatch.setattr(activity_watch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(sampler, "take", lambda *_, **__: {0: self._sample()})
        self.stream = Stream(Output("node1", 0, 0, "stdout", 0), send=None, log=None)
        pump: Any = SimpleNamespace(stream=self.stream)
        self.worker = Worker(0, 0, None, pumps=[pump], pid=PID, started_at=self.now)
        self.stacks: list[bool] = []
        self.group = SimpleNamespace(
            debugged=0,
            debugged_at=0.0,
            attempt=0,
            host="node1",
            workers=[self.worker],
            streams=(self.stream,),
            all_ended=True,
            request_stacks=lambda resume: self.stacks.append(resume),
            pids_by_local_rank=lambda: {0: PID},
        )
        self.reports: list[Any] = []
        self.node_limits_s: list[float] = []
        self.events: list[Any] = []
        self.watch = ActivityWatch(
            TimeoutConfig(**{"hang_report_s": None, **timeouts}),
            self.group,  # type: ignore[arg-type]
            SimpleNamespace(is_connected=lambda _pid: bool(self.status)),  # type: ignore[arg-type]
            self._ask_node,
            Routes(self.reports.append, self.reports.append, self.events.append),
        )

    def _ask_node(self, limit_s: float) -> NodeEvidence:
        self.node_limits_s.append(limit_s)
        return NodeEvidence(host="node1")

    def _sample(self) -> Sample:
        activity = ProcessActivity({PID: self.cpu_s}, {PID: 0}, 0.0)
        return Sample(PID, self.now, activity, status=self.status, flight_record=FlightRecord(calls=self.calls))

    def run(self, *steps: Callable[[], object]) -> None:
        """Before each step the time is that of the watch's deadline; its events are handled after each."""
        self.watch.begin()
        for step in steps:
            self._handle_events()
            self.watch.run_due(self.now)
            self._handle_events()
            self.now = max(self.now, min(self.watch.run_due(self.now), self.now + 3600))
            step()
            self._handle_events()
        self.watch.end(lambda *_: True)

    def _handle_events(self) -> None:
        while self._events_are_handled():
            pass

    def _events_are_handled(self) -> bool:
        activity_watch.threading.enumerate()
        for thread in activity_watch.threading.enumerate():
            if thread.name == "sampler":
                thread.join(10)
        for event in self.events:
            self.watch.handle_event(event)
        return bool(self.events and not self.events.clear())


def nothing() -> None:
    pass


def activities(watched: Watched) -> list[WorkerActivity]:
    return [report for report in watched.reports if isinstance(report, WorkerActivity)]


def test_without_limits_nothing_is_sampled_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.run(nothing, nothing)
    assert watched.reports == []


def test_quiet_workers_are_reported_until_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)
    watched.run(nothing, nothing, nothing, nothing, lambda: watched.stream.write(b"line\n"), nothing)
    quiet = activities(watched)
    assert quiet[-1] == WorkerActivity(0, is_finished=True)
    assert quiet[-2] == WorkerActivity(0, host="node1")
    times = [report.quiet_s for report in quiet[:-2]]
    assert times == sorted(times)
    assert times[0] == 6.0
    assert all(0 < later - earlier <= 10 for earlier, later in itertools.pairwise(times))


def test_workers_that_are_debugged_are_not_quiet_and_begin_afresh_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)

    def end() -> None:
        watched.group.debugged, watched.group.debugged_at = 0, watched.now

    watched.group.debugged = 1
    watched.run(*[nothing] * 20, end, nothing, nothing)
    quiet = activities(watched)
    assert max(report.quiet_s for report in quiet) < 30


def test_a_report_comes_just_when_a_limit_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)
    watched.run(*[nothing] * 12)
    assert any(60.0 <= report.still_s < 60.6 for report in activities(watched))


def test_a_worker_that_computes_is_quiet_but_not_still(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)

    def compute() -> None:
        watched.cpu_s += 5

    watched.run(nothing, nothing, compute, compute, compute)
    last = activities(watched)[-2]
    assert last.quiet_s > 20
    assert last.still_s == 0


def test_a_worker_that_does_little_is_seen_over_a_longer_time(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=5.0)

    def compute_a_little() -> None:
        watched.cpu_s += 0.02  # In 0.8 s.

    watched.run(nothing, *[compute_a_little] * 30)
    last = activities(watched)[-2]
    assert last.quiet_s > 10
    assert max(report.still_s for report in activities(watched)) < 3


def test_a_suspended_machine_was_not_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)

    def suspend() -> None:
        watched.now += 5000

    watched.run(suspend, nothing)
    assert all(report.quiet_s < 60 for report in activities(watched))


def test_an_examination_takes_stacks_twice_and_resumes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)
    watched.run(nothing, lambda: watched.watch.handle_event(ExamineWorkers(0, 5)), nothing, nothing)
    (examined,) = [report for report in watched.reports if isinstance(report, WorkersExamined)]
    assert (examined.number, [rank.pid for rank in examined.ranks]) == (5, [PID])
    assert examined.node == NodeEvidence(host="node1")
    assert watched.stacks == [False, False]


def test_a_job_that_hangs_is_the_attempts_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)
    failures: list[AttemptFailure | None] = []

    def abort() -> None:
        failures.extend(watched.watch.handle_event(AbortHungAttempt(number, "hangs")) for number in (7, 0))

    watched.run(abort)
    assert failures == [None, AttemptFailure("hangs", hung=True)]
    assert watched.watch.is_hung
    assert watched.stacks == [True]
    assert watched.watch.handle_event(AbortHungAttempt(0, "hangs")) is None


def test_events_of_another_attempt_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)
    watched.run(lambda: [watched.watch.handle_event(event) for event in (OutputResumed(3), WorkersSampled(3, {}))])
    assert watched.reports == [WorkerActivity(0, is_finished=True)]


def test_while_output_flows_it_is_told_for_how_long_no_collective_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_report_s=300.0)
    watched.status, watched.calls = b"6 calls", (call(6),)

    def write() -> None:
        watched.stream.write(b"still here\n")

    def call_another() -> None:
        write()
        watched.status = b"7 calls"

    watched.run(*[write] * 15, call_another, *[write] * 8)
    told = activities(watched)[:-1]
    assert all(not report.quiet_s and report.host == "node1" for report in told)
    times = [report.waiting_s for report in told]
    again = times.index(0.0)
    assert times[:again] == sorted(times[:again])
    assert times[again - 1] > 60
    assert all(report.has_waiting for report in told[:again])


def test_who_waits_for_a_rank_that_is_debugged_does_not_wait_in_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_report_s=300.0)
    watched.status, watched.calls = b"6 calls", (call(6),)

    def end() -> None:
        watched.group.debugged, watched.group.debugged_at = 0, watched.now

    watched.group.debugged = 1
    watched.run(*[nothing] * 30, end, *[lambda: watched.stream.write(b"line\n")] * 8)
    assert watched.now > 1300
    assert max(report.waiting_s for report in activities(watched)) < 250


def test_a_job_that_writes_and_has_no_process_group_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_report_s=300.0)
    watched.run(*[lambda: watched.stream.write(b"line\n")] * 15)
    assert watched.reports == [WorkerActivity(0, is_finished=True)]


def test_a_lack_of_threads_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)
    refused = Mock(side_effect=RuntimeError("can't start new thread"))
    with monkeypatch.context() as limited:
        limited.setattr(activity_watch.threading.Thread, "start", refused)
        watched.run(nothing, nothing, nothing)
    assert refused.call_count


def test_before_a_stop_quiet_workers_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_report_s=300.0)
    watched.run(nothing, nothing)
    assert watched.now - 1000 >= 10

    def wait(done: Callable[[], bool], _deadline: object) -> bool:
        watched._events_are_handled()
        return done()

    watched.watch.examine_before_stop(wait)  # type: ignore[arg-type]
    last = watched.reports[-1]
    assert isinstance(last, WorkersExamined)
    assert (last.number, last.node, watched.node_limits_s) == (0, NodeEvidence(host="node1"), [0.4])
    assert not watched.watch.delays_stop, "the attempt has ended"
