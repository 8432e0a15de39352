"""The quiet times of a job in events.jsonl: those of all nodes whose workers run."""

from __future__ import annotations

import pytest

from ddplaunch.features.hangs.quiet_time import QUIET_S, QuietTime
from ddplaunch.features.hangs.records import WorkerActivity
from ddplaunch.protocol.launcher_agent import AttemptEnded
from ddplaunch.protocol.results import AttemptResult

ENDED = AttemptEnded(AttemptResult(attempt=0, outcome="failed", exits=(), duration_s=60.0))


class Job:
    """A job of two nodes, and the events that were written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("ddplaunch.features.hangs.quiet_time.time.time", lambda: self.now_s)
        self.events: list[object] = []
        self.quiet = QuietTime(lambda kind, _, t, **facts: self.events.append((kind, t, *facts.values())))

    def report(self, now_s: float, node: int, quiet_s: float, attempt: int = 0, *, is_finished: bool = False) -> None:
        self.now_s = now_s
        self.quiet.on_event(node, (0, 1), WorkerActivity(attempt, quiet_s, is_finished=is_finished))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_a_job_is_quiet_when_all_its_nodes_are(job: Job) -> None:
    job.report(1000.0, 0, QUIET_S + 5)
    job.report(1000.0, 1, QUIET_S - 5)
    assert job.events == []
    job.report(1010.0, 1, QUIET_S + 5)
    job.report(1014.0, 1, QUIET_S + 9)
    assert job.events == [("quiet", 945.0, 0)]
    job.report(1020.0, 0, 0.0)
    job.report(1021.0, 0, 0.0)
    assert job.events[1:] == [("active", 1020.0, 0, 75.0)]


def test_a_node_that_has_ended_its_part_ends_no_quiet_time_of_the_others(job: Job) -> None:
    for node in (0, 1):
        job.report(1000.0, node, QUIET_S)
    job.report(1010.0, 0, 0.0, is_finished=True)
    assert job.events == [("quiet", 940.0, 0)]
    job.report(1020.0, 1, 0.0)
    assert job.events[1:] == [("active", 1020.0, 0, 80.0)]
    job.report(1090.0, 1, QUIET_S)
    assert job.events[2:] == [("quiet", 1030.0, 0)]


def test_it_is_not_quiet_after_its_end(job: Job) -> None:
    for node in (0, 1):
        job.report(1000.0, node, QUIET_S)
    job.quiet.on_event(0, (0, 1), ENDED)
    assert job.events == [("quiet", 940.0, 0), ("active", 1000.0, 0, 60.0)]


def test_the_next_attempt_begins_anew(job: Job) -> None:
    for node in (0, 1):
        job.report(1000.0, node, QUIET_S)
    job.report(1010.0, 0, QUIET_S, attempt=1)
    job.report(1011.0, 1, 0.0)
    assert job.events == [("quiet", 940.0, 0), ("active", 1010.0, 0, 70.0)]


def test_a_job_that_hangs_is_quiet_also_within_a_shorter_limit(job: Job) -> None:
    job.quiet.on_hang()
    job.report(1000.0, 0, 20.0, attempt=3)
    job.quiet.on_hang()
    job.quiet.on_hang()
    assert job.events == [("quiet", 980.0, 3)]
