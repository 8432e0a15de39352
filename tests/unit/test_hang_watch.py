"""When the launcher examines a job, what it reports, and when it ends it."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from ddplaunch.config import LaunchConfig
from ddplaunch.features.gpus.records import GpuReading
from ddplaunch.features.hangs import launcher as hang_watch
from ddplaunch.features.hangs.examinations import Examination
from ddplaunch.features.hangs.explanation import explain
from ddplaunch.features.hangs.last_states import LastStates
from ddplaunch.features.hangs.launcher import HangWatch
from ddplaunch.features.hangs.records import (
    AbortHungAttempt,
    ExamineWorkers,
    NodeEvidence,
    WorkerActivity,
    WorkersExamined,
)
from ddplaunch.protocol.launcher_agent import AttemptEnded
from ddplaunch.protocol.results import AttemptResult, WorkerError, WorkerExit
from ddplaunch.protocol.run_result import RunResult
from ddplaunch.timeouts import TimeoutConfig
from tests.support import golden
from tests.support.configs import rendezvous_config
from tests.support.hangs import call, done, evidence
from tests.support.watches import run_services

pytestmark = pytest.mark.usefixtures("utc")

WAITS = evidence(0, [*done(2), call(3)])
SLEEPS = evidence(1, done(2), where="train.py:6 in step (sleep)")
RANKS = {
    "waits": WAITS,
    "sleeps": SLEEPS,
    "computes": replace(SLEEPS, cpu_s=4.0),
    "moves": replace(SLEEPS, collectives_moved=True),
    "writes": replace(SLEEPS, silent_s=0.5),
    "moving": replace(WAITS, collectives_moved=True),
}
GPU = GpuReading(index=0, utilization=97, memory_utilization=60, power_w=600.0, power_limit_w=700.0)


class Job:
    """A HangWatch of two nodes with a worker each. Its methods are the steps of a story."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path | None, options: dict[str, float]) -> None:
        self.now, self.number = 1000.0, 0
        monkeypatch.setattr(hang_watch.time, "monotonic", lambda: self.now)
        self.said: list[str] = []
        self._folder, self.is_by_hand = folder, bool(options.pop("by_hand", 0))
        meets = rendezvous_config() if options.pop("launchers", 1) == 2 else None
        limits = {f"{name}_s": limit or None for name, limit in options.items()}
        config = LaunchConfig(script="x.py", timeouts=TimeoutConfig(**limits), rendezvous=meets)
        show = lambda text, *_: self.said.append(text)  # noqa: E731
        self.noted: list[str] = []
        note = lambda kind, *_, **__: self.noted.append(kind)  # noqa: E731
        self.posted: SimpleQueue[Callable[[], object]] = SimpleQueue()
        run = run_services(config, self._sent, folder, show, self.posted.put, note=note)
        self.watch, self.at_end = HangWatch(run), LastStates(run)
        self.later(1)

    def _sent(self, order: Any) -> None:
        self.said.append(f"order: {order}")
        order = getattr(order, "order", order)
        self.number = order.number if isinstance(order, ExamineWorkers) else self.number

    def later(self, seconds: float) -> None:
        """Time passes."""
        self.now += float(seconds)
        self.deadline = self.watch.run_due(self.now)

    def due(self) -> None:
        """Until the watch wants to be called."""
        self.later(self.deadline - self.now)

    def report(self, node: int, **facts: Any) -> None:
        self.watch.on_report(node, (0, 1), WorkerActivity(0, **facts))

    def quiet(self, quiet_s: str, still_s: str = "", nodes: str = "01") -> None:
        """These nodes report, and are judged."""
        for node in map(int, nodes):
            self.report(node, quiet_s=float(quiet_s), still_s=float(still_s or quiet_s), host=f"gpu{node}")
        self.later(hang_watch._JUDGE_S)

    def waiting(self, waiting_s: str) -> None:
        """Rank 0 waits in a collective, and rank 1 writes output."""
        limit_s = float(waiting_s)
        self.report(0, quiet_s=limit_s, still_s=limit_s, waiting_s=limit_s, has_waiting=True)
        self.report(1, waiting_s=limit_s)
        self.later(hang_watch._JUDGE_S)

    def active(self, node: str) -> None:
        self.report(int(node))

    def finished(self, node: str) -> None:
        self.report(int(node), is_finished=True)

    def ended(self) -> None:
        """The attempt has ended on all nodes."""
        self.watch.on_event(0, AttemptEnded(AttemptResult(attempt=0, outcome="failed", exits=(), duration_s=60.0)))

    def examined(self, node: str, rank: str, gpu: str = "") -> None:
        """The answer of a node; ``gpu``: its GPU computes."""
        facts = NodeEvidence(host="gpu0", gpus=(GPU,)) if gpu else None
        found = replace(RANKS[rank], rank=int(node))
        for watch in (self.watch, self.at_end):
            watch.on_report(int(node), (0, 1), WorkersExamined(0, self.number, (found,), facts))

    def stopped(self) -> None:
        """The user has stopped the job, after an examination that nobody asked for."""
        self.at_end.add_to_result(RunResult("job7", 0, "stopped", 1.0))

    def thread_ends(self) -> None:
        """A hang has been explained, or written."""
        self.posted.get(timeout=30)()

    def hang(self) -> None:
        """All nodes have answered; a thread explains."""
        self.quiet("300")
        self.examined("0", "waits")
        self.examined("1", "sleeps")
        self.said.clear()

    def play(self, step: str) -> str:
        """The threads end at once, unless the story says when."""
        self.said.clear()
        self.noted.clear()
        word, *arguments = step.split()
        getattr(self, word)(*arguments)
        while self.watch.is_concluding and not self.is_by_hand:
            self.thread_ends()
        if self.is_by_hand:
            self.said += [f"noted: {kind}" for kind in self.noted]
        return "\n".join([step, *(f"    {line}" for line in self.said)]).replace(str(self._folder), "<folder>")


def test_when_a_job_is_examined_reported_and_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A story is a list of limits, and of steps. ``by_hand=1``: it has files, and says when the threads end."""

    def story(text: str) -> str:
        limits, _, steps = text.partition(": ")
        options = {name: float(limit) for name, limit in (word.split("=") for word in limits.split() if "=" in word)}
        folder = Path(tempfile.mkdtemp(dir=tmp_path)) if "by_hand" in options else None
        job = Job(monkeypatch, folder, options)
        return "\n".join(map(job.play, steps.split(", ")))

    golden.check_pages("hang_watch", story)


class Events:
    """A HangWatch of two nodes, and the events that it notes. Its methods are the steps of a story."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.steps, self.said = 1000.0, 0, list[str]()
        for clock in ("time", "monotonic"):
            monkeypatch.setattr(hang_watch.time, clock, lambda: self.now_s)
        note = lambda kind, _, t, **facts: self.said.append(f"{kind} at {t}: {facts}")  # noqa: E731
        self.watch = HangWatch(run_services(LaunchConfig(script="x.py"))._replace(note=note))

    def report(self, now_s: str, node: str, quiet_s: str, attempt: str = "0", is_finished: str = "") -> None:
        self.now_s = float(now_s)
        activity = WorkerActivity(int(attempt), float(quiet_s), is_finished=bool(is_finished))
        self.watch.on_report(int(node), (0, 1), activity)
        self.steps += 1
        self.watch.run_due(self.now_s + self.steps)

    def end(self) -> None:
        self.watch.on_event(0, AttemptEnded(AttemptResult(attempt=0, outcome="failed", exits=(), duration_s=60.0)))


def test_when_a_job_is_noted_as_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its nodes whose workers run are."""
    golden.check_pages("quiet_times", lambda story: golden.play(Events(monkeypatch), story.partition(": ")[2]))


def test_the_files_of_a_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = Job(monkeypatch, tmp_path, {"hang_timeout": 60.0})
    for step in ("quiet 60", "examined 0 waits", "examined 1 sleeps"):
        job.play(step)
    assert AbortHungAttempt.__name__ in job.said[-1]
    facts = json.loads((tmp_path / "hang.json").read_text())
    assert (facts["schema"], facts["job_state"], facts["culprits"]) == (1, "stuck", [1])
    assert [rank["rank"] for rank in facts["ranks"]] == [0, 1]
    assert "rank 1 on gpu0, pid 101" in (tmp_path / "hang.txt").read_text()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_an_answer_costs_the_same_however_many_nodes_there_are() -> None:
    """CPU time, which a busy machine does not change: some milliseconds, and seconds if each looks at all others."""
    nodes, before_s = range(10_000), time.thread_time()
    examination = Examination(1, 0, 0.0, set(nodes))
    assert [examination.take(index, nodes, WorkersExamined(0, 1, ())) for index in nodes].index(True) == nodes[-1]
    assert time.thread_time() - before_s < 1


def test_without_room_for_a_thread_the_job_is_examined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, None, {})
    with monkeypatch.context() as limited:
        limited.setattr(threading, "Thread", Mock(side_effect=RuntimeError("can't start new thread")))
        job.hang()
        job.thread_ends()
    assert job.said == []
    job.later(100)
    assert ExamineWorkers.__name__ in job.said[-1]


def test_a_file_of_an_earlier_hang_is_never_overwritten(tmp_path: Path) -> None:
    found = explain([WAITS, SLEEPS])
    examination = Examination(1, 0, 0.0, set(), {0: WorkersExamined(0, 1, (WAITS, SLEEPS))})
    written = [examination.write(tmp_path, found) for _ in range(102)]
    assert len({*written[:100]}) == len([*tmp_path.glob("hang*.txt")]) == 100
    assert written[100:] == [None, None]
    assert "bytes read and written (too little to count)" in (tmp_path / "hang.txt").read_text()


def test_reports_that_come_together_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each judgement passes over all nodes: one for each report would take minutes of CPU time with thousands."""
    job = Job(monkeypatch, None, {})
    job.play("quiet 100")
    for node in (0, 1):
        job.report(node, quiet_s=300.0, still_s=300.0)
        assert job.watch.run_due(job.now) == job.now + hang_watch._JUDGE_S
    assert job.said == []
    job.due()
    assert job.said == ["order: ExamineWorkers(attempt=0, number=1, is_requested=False, all_nodes_at='')"]


def test_each_event_of_a_quiet_job_costs_the_same_with_two_nodes_and_a_thousand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counts how often the report of a node is looked at while answers to pings come in, and while all nodes report."""

    class CountedReport(WorkerActivity):
        looks = 0

        def __getattribute__(self, name: str) -> Any:
            CountedReport.looks += name.endswith("_s")
            return super().__getattribute__(name)

    def looks(nodes: int) -> float:
        job, participants, CountedReport.looks = Job(monkeypatch, None, {}), range(nodes), 0
        for number in range(10):
            for index in participants:
                job.watch.on_report(index, participants, CountedReport(0, 30.0 * number, 30.0 * number))
                job.watch.run_due(job.now)
            job.now += 30.0
        return CountedReport.looks / nodes

    assert looks(1000) < 2 * looks(2)


def exit_(rank: int, returncode: int = 0, **fields: Any) -> WorkerExit:
    return WorkerExit(rank, 0, f"node{rank}", 1, returncode, stopped=False, time_s=0.0, duration_s=1.0, **fields)


def test_what_the_nodes_knew_of_a_failed_collective_is_explained_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = exit_(0, 1, error=WorkerError("Timed out waiting 3000ms for recv operation", "", 1.0))
    waits = evidence(0, [*done(5), call(6)], world=2, is_running=False, window_s=0.0)
    is_late = evidence(1, done(5), world=2, host="gpu1", window_s=0.0, where="train.py:9 in load")
    result = AttemptResult(0, "failed", (lost, exit_(1)), 1.0)
    whole = Job(monkeypatch, None, {}).at_end.explain(
        result, [WorkersExamined(0, 0, (is_late,)), WorkersExamined(0, 0, (waits,))]
    )
    assert whole.collectives[0] == "rank 1 on gpu1 never joined all_reduce #6 of default_pg (3 floats)"
    assert whole.collectives[-1] == "rank 1 is at train.py:9 in load"


def test_where_ranks_waited_is_known_when_a_node_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = evidence(0, [*done(5), call(6)], world=2, is_running=True, window_s=0.0, where="train.py:7")
    whole = Job(monkeypatch, None, {}).at_end.explain(
        AttemptResult(0, "stopped", (exit_(0),), 1.0), [WorkersExamined(0, 0, (waits,))]
    )
    assert whole.collectives == ("rank 0 waited in all_reduce #6 of default_pg (3 floats) since 14:47:37 (train.py:7)",)


def test_sentences_of_an_agent_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = AttemptResult(0, "failed", (exit_(0),), 1.0, collectives=("made up",))
    assert Job(monkeypatch, None, {}).at_end.explain(result, []).collectives == ()
