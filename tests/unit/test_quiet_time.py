"""The quiet times of a job in events.jsonl: those of all nodes whose workers run."""

from __future__ import annotations

import pytest

from ddplaunch.features.hangs.quiet_time import QuietTime
from ddplaunch.features.hangs.records import WorkerActivity
from ddplaunch.protocol.launcher_agent import AttemptEnded
from ddplaunch.protocol.results import AttemptResult
from tests.support import golden

ENDED = AttemptEnded(AttemptResult(attempt=0, outcome="failed", exits=(), duration_s=60.0))


class Job:
    """A job of two nodes, and the events that are written. Its methods are the steps of a story."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("ddplaunch.features.hangs.quiet_time.time.time", lambda: self.now_s)
        self.said: list[str] = []
        self.quiet = QuietTime(lambda kind, _, t, **facts: self.said.append(f"{kind} at {t}: {facts}"))

    def report(self, now_s: str, node: str, quiet_s: str, attempt: str = "0", is_finished: str = "") -> None:
        self.now_s = float(now_s)
        activity = WorkerActivity(int(attempt), float(quiet_s), is_finished=bool(is_finished))
        self.quiet.on_report(int(node), (0, 1), activity)

    def end(self) -> None:
        self.quiet.on_event(0, ENDED)


def test_when_a_job_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    golden.check_pages("quiet_times", lambda story: golden.play(Job(monkeypatch), story.partition(": ")[2]))
