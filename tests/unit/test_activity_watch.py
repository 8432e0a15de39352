"""For how long the workers of a node have been quiet, and what the agent asks them when."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ddplaunch.agent.workers.output import Stream
from ddplaunch.agent.workers.worker import Worker
from ddplaunch.features.hangs import activity_watch
from ddplaunch.features.hangs import evidence as hang_evidence
from ddplaunch.features.hangs.activity_watch import ActivityWatch
from ddplaunch.features.hangs.evidence import Sample
from ddplaunch.features.hangs.process_activity import ProcessActivity
from ddplaunch.features.hangs.records import (
    Calls,
    CollectiveCall,
    ExamineWorkers,
    FlightRecord,
    NodeEvidence,
    WorkersExamined,
)
from ddplaunch.protocol.launcher_agent import Output
from ddplaunch.timeouts import TimeoutConfig
from tests.support import golden
from tests.support.hangs import call

PID = 77


class Watched:
    """A watch of one worker, whose time and samples the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **timeouts: Any) -> None:
        self.now, self.cpu_s, self.status = 1000.0, 0.0, b""
        self.calls: tuple[CollectiveCall, ...] = ()
        monkeypatch.setattr(activity_watch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(hang_evidence, "take_samples", lambda *_, **__: {0: self._sample()})
        self.stream = Stream(Output("node1", 0, 0, "stdout", 0), send=None, log=None)
        self.worker = Worker(0, 0, None, streams=(self.stream,), pid=PID, started_at=self.now)
        self.stacks: list[bool] = []
        self.group: Any = SimpleNamespace(
            debugged=0,
            debugged_at=0.0,
            attempt=0,
            host="node1",
            workers=[self.worker],
            streams=(self.stream,),
            all_ended=True,
            pids_by_local_rank=lambda: {0: PID},
        )
        self.reports: list[Any] = []
        self.node_limits_s: list[float] = []
        self.events: list[Any] = []
        node: Any = SimpleNamespace(
            spec=SimpleNamespace(timeouts=TimeoutConfig(**{"hang_report_s": None, **timeouts})),
            outbox=SimpleNamespace(send=self.reports.append),
            report=self.reports.append,
            post=self.events.append,
        )
        examiner: Any = SimpleNamespace(is_connected=lambda _pid: bool(self.status))
        dumps: Any = SimpleNamespace(request=lambda *, resume: self.stacks.append(resume), texts=())
        self.watch = ActivityWatch(node, self.group, [dumps], examiner, self._ask_node)

    def _ask_node(self, limit_s: float) -> NodeEvidence:
        self.node_limits_s.append(limit_s)
        return NodeEvidence(host="node1")

    def _sample(self) -> Sample:
        activity = ProcessActivity(PID, self.now, {PID: self.cpu_s}, {PID: 0}, 0.0)
        return Sample(activity, status=self.status, flight_record=FlightRecord(made=Calls(self.calls)))

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
        self.watch.end()
        self._handle_events()  # No thread outlasts the test, and its samples.
        for thread in threading.enumerate():
            if thread.name == "sampler":  # It must not outlive what ``monkeypatch`` has set.
                thread.join(30)

    # Steps of a story.

    def rest(self) -> None:
        """The worker does nothing."""

    def write(self) -> None:
        self.stream.keep(b"line\n")

    def call(self, number: str) -> None:
        """A collective, while the worker writes."""
        self.write()
        self.status, self.calls = f"{number} calls".encode(), (call(6),)

    def compute(self, cpu_s: str) -> None:
        self.cpu_s += float(cpu_s)

    def suspend(self) -> None:
        """The machine."""
        self.now += 5000

    def undebug(self) -> None:
        self.group.debugged, self.group.debugged_at = 0, self.now

    def play(self, steps: list[str]) -> str:
        """What is reported up to each step; ``20 x write`` is a step that is done 20 times."""
        said: list[str] = []

        def do(step: str, title: str) -> None:
            word, *arguments = step.split()
            getattr(self, word)(*arguments)
            said.extend([title, *self._reported()] if title else [])

        each: list[Callable[[], object]] = []
        for title in steps:
            times, _, step = title.rpartition(" x ")
            each += [functools.partial(do, step, "")] * (int(times or 1) - 1)
            each.append(functools.partial(do, step, title))
        self.run(*each)
        return "\n".join([*said, "end", *self._reported()])

    def _reported(self) -> list[str]:
        """The times of all reports since the last call; zeros are told of the first column only."""
        told = [report for report in self.reports if not report.is_finished]
        finished = ["    finished"] * (len(self.reports) - len(told))
        self.reports.clear()
        assert all(report.host == "node1" for report in told)
        columns = {
            name: [getattr(report, name) for report in told]
            for name in ("quiet_s", "still_s", "waiting_s", "has_waiting")
        }
        lines = (f"    {name}: {' '.join(f'{float(each):.4g}' for each in column)}" for name, column in columns.items())
        shown = [line for line in lines if re.search("[1-9]", line) or (told and "quiet_s" in line)]
        return [*shown, *finished]

    def _handle_events(self) -> None:
        while self._events_are_handled():
            pass

    def _events_are_handled(self) -> bool:
        for thread in threading.enumerate():
            if thread.name == "sampler":
                thread.join(10)
        for event in self.events:
            event()
        return bool(self.events and not self.events.clear())


def nothing() -> None:
    pass


def test_for_how_long_workers_have_been_quiet_or_have_waited() -> None:
    """A story is a sentence, limits and steps."""

    def story(text: str) -> str:
        """Of limits and what holds from the begin, and of steps."""
        words, *steps = text.partition(": ")[2].split(", ")
        limits = {name: float(limit) for name, limit in (word.split("=") for word in words.split() if "=" in word)}
        with pytest.MonkeyPatch.context() as patch:
            watched = Watched(patch, **limits)
            watched.group.debugged = int("debugged" in words)
            if "calls" in words:
                watched.call("6")
            return watched.play(steps)

    golden.check_pages("activity_watch", story)


def test_an_examination_takes_stacks_twice_and_resumes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)
    watched.run(nothing, lambda: watched.watch.examine(ExamineWorkers(0, 5)), nothing, nothing)
    (examined,) = [report for report in watched.reports if isinstance(report, WorkersExamined)]
    assert (examined.number, [rank.pid for rank in examined.ranks]) == (5, [PID])
    assert examined.node == NodeEvidence(host="node1")
    assert watched.stacks == [False, False]


def test_orders_for_another_attempt_are_not_the_watchs(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)
    found: list[bool] = []
    watched.run(lambda: watched.events.append(lambda: found.extend(map(watched.watch.is_of, (0, 3)))))
    assert found == [True, False]
    assert not watched.watch.is_of(0), "it has ended"


def test_workers_that_have_ended_are_told_of_at_once_and_only_if_that_is_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    watched.group.workers, watched.group.pids_by_local_rank = [], dict
    watched.watch.examine(ExamineWorkers(0, 1, is_requested=True))
    watched.run()
    for order in (ExamineWorkers(0, 2, is_requested=True), ExamineWorkers(0, 3)):
        watched.watch.examine(order)
    assert watched.reports == [WorkersExamined(0, 1, ()), WorkersExamined(0, 2, ())]


def test_a_lack_of_threads_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)
    refused = Mock(side_effect=RuntimeError("can't start new thread"))
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refused)
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
