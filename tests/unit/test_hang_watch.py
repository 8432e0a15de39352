"""When the launcher examines a job, what it reports, and when it ends it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.config import LaunchConfig
from ddplaunch.features.hangs import hang_files
from ddplaunch.features.hangs import launcher as hang_watch
from ddplaunch.features.hangs.explanation import explain
from ddplaunch.features.hangs.launcher import HangWatch
from ddplaunch.features.hangs.records import NodeEvidence, RankEvidence
from ddplaunch.protocol.gpus import GpuReading
from ddplaunch.protocol.launcher_agent import (
    AbortHungAttempt,
    ExamineWorkers,
    OrderToNodes,
    WorkerActivity,
    WorkersExamined,
)
from ddplaunch.timeouts import TimeoutConfig
from tests.support.hangs import call, done, evidence

WAITS = evidence(0, [*done(2), call(3)])
SLEEPS = evidence(1, done(2), where="train.py:6 in step (sleep)")
COMPUTES = replace(SLEEPS, cpu_s=4.0)
MOVES = replace(SLEEPS, collectives_moved=True)


class Watched:
    """A HangWatch of two nodes with a worker each, at a time that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path | None = None, **timeouts: Any) -> None:
        self.now = 1000.0
        monkeypatch.setattr(hang_watch.time, "monotonic", lambda: self.now)
        self.sent: list[object] = []
        self.shown: list[str] = []
        config = LaunchConfig(script="x.py", timeouts=TimeoutConfig(**timeouts))
        messages = SimpleNamespace(show=lambda text, *_: self.shown.append(text), record=lambda *_: None)
        self.watch = HangWatch(config, self.sent.append, lambda: folder, messages)  # type: ignore[arg-type]
        self.now += 1
        self.watch.run_due(self.now)

    def quiet(self, quiet_s: float, still_s: float | None = None, nodes: tuple[int, ...] = (0, 1)) -> float:
        """Both nodes report, late enough to be judged; returns when the watch wants to be called again."""
        self.now += hang_watch._JUDGE_S
        for index in nodes:
            activity = WorkerActivity(0, quiet_s, quiet_s if still_s is None else still_s)
            self.watch.on_report(index, (0, 1), activity)
        return self.watch.run_due(self.now)

    def answer(self, *ranks: RankEvidence, node: NodeEvidence | None = None) -> None:
        (order,) = self.sent
        assert isinstance(order, ExamineWorkers)
        self.sent.clear()
        for index, rank in enumerate(ranks):
            self.watch.on_report(index, (0, 1), WorkersExamined(0, order.number, (rank,), node))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_job_that_stands_still_is_reported_once_and_goes_on(watched: Watched) -> None:
    watched.quiet(299.0)
    assert watched.sent == []
    watched.quiet(300.0)
    assert watched.sent == [ExamineWorkers(0, 1)]
    watched.answer(WAITS, SLEEPS)
    assert watched.shown[0] == "nothing has moved for 5 min: the job seems to hang"
    assert watched.shown[1].startswith("  rank 1 never joined all_reduce #3 of default_pg")
    assert "  rank 1 is at train.py:6 in step (sleep)" in watched.shown
    watched.now += 1000
    watched.quiet(1300.0)
    assert watched.sent == []


def test_it_is_reported_that_the_job_moves_again_and_the_next_pause_must_be_ten_times_as_long(
    watched: Watched,
) -> None:
    watched.quiet(310.0)
    watched.answer(WAITS, SLEEPS)
    watched.shown.clear()
    watched.watch.on_report(1, (0, 1), WorkerActivity(0))
    assert watched.shown == ["the job moves again, after 5 min 10 s"]
    watched.now += 100
    watched.quiet(3000.0)
    assert watched.sent == []
    watched.quiet(3100.0)
    assert watched.sent == [ExamineWorkers(0, 2)]


def test_a_job_is_not_examined_while_a_node_moves_or_has_not_reported(watched: Watched) -> None:
    watched.quiet(500.0, nodes=(0,))
    watched.watch.on_report(1, (0, 1), WorkerActivity(0))
    watched.watch.run_due(watched.now)
    assert watched.sent == []


def test_a_node_that_has_done_its_part_does_not_count(watched: Watched) -> None:
    watched.watch.on_report(1, (0, 1), WorkerActivity(0, is_finished=True))
    watched.quiet(300.0, nodes=(0,))
    watched.answer(replace(SLEEPS, rank=0))
    assert watched.shown[0].startswith("nothing has moved for 5 min")


def test_evidence_of_movement_prevents_any_end(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0, busy_timeout_s=60.0)
    watched.quiet(400.0)
    watched.answer(WAITS, MOVES)
    assert (watched.sent, watched.shown) == ([], [])


def test_a_job_that_stands_still_is_ended_if_the_user_wants_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    watched = Watched(monkeypatch, tmp_path, hang_timeout_s=60.0)
    watched.quiet(60.0)
    watched.answer(WAITS, SLEEPS)
    (order,) = watched.sent
    assert isinstance(order, AbortHungAttempt)
    assert order.reason.startswith("nothing has moved for 1 min: the job hangs; rank 1 never joined all_reduce #3")
    facts = json.loads((tmp_path / "hang.json").read_text())
    assert (facts["schema"], facts["job_state"], facts["culprits"]) == (1, "stuck", [1])
    assert [rank["rank"] for rank in facts["ranks"]] == [0, 1]
    assert "rank 1 on gpu0, pid 101" in (tmp_path / "hang.txt").read_text()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_file_of_an_earlier_hang_is_never_overwritten(tmp_path: Path) -> None:
    found = explain([WAITS, SLEEPS])
    written = [hang_files.write(tmp_path, 0, [WAITS, SLEEPS], (), found) for _ in range(102)]
    assert len({*written[:100]}) == len([*tmp_path.glob("hang*.txt")]) == 100
    assert written[100:] == [None, None]
    assert "bytes read and written (too little to count)" in (tmp_path / "hang.txt").read_text()


def test_ranks_that_wait_for_one_that_computes_are_reported_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)
    watched.quiet(300.0, still_s=0.0)
    watched.answer(WAITS, COMPUTES)
    assert watched.sent == []
    assert watched.shown[0] == "no output and no collective for 5 min, while some ranks compute"


def test_they_are_ended_with_a_busy_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, busy_timeout_s=60.0)
    watched.quiet(60.0, still_s=0.0)
    watched.answer(WAITS, COMPUTES)
    (order,) = watched.sent
    assert isinstance(order, AbortHungAttempt)
    assert order.reason.startswith("no output and no collective for 1 min (--busy-timeout); rank 1 never joined")


def test_a_gpu_that_computes_is_movement(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=60.0)
    watched.quiet(60.0)
    gpu = GpuReading(index=0, utilization=97, memory_utilization=60, power_w=600.0, power_limit_w=700.0)
    watched.answer(WAITS, SLEEPS, node=NodeEvidence(host="gpu0", gpus=(gpu,)))
    assert watched.sent == []


def test_without_the_answer_of_one_node_the_others_are_reported_and_nothing_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, hang_timeout_s=300.0)
    for index in (0, 1):
        watched.watch.on_report(index, (0, 1), WorkerActivity(0, 300.0, 300.0, host=f"gpu{index}"))
    deadline = watched.watch.run_due(watched.now)
    watched.answer(WAITS)
    watched.now = deadline
    watched.watch.run_due(deadline)
    silence = "no output and no collective for 5 min, and no answer from gpu1 for 20 s"
    assert watched.shown[0] == f"{silence}: the job may hang; of the other nodes:"
    assert any("never joined all_reduce #3" in line for line in watched.shown)
    watched.now += 100
    watched.quiet(500.0)
    assert watched.sent == [ExamineWorkers(0, 2)], "the question is still open"


def waiting(watched: Watched, waiting_s: float) -> None:
    """Rank 0 waits in a collective, and rank 1 writes output."""
    watched.now += hang_watch._JUDGE_S
    watched.watch.on_report(0, (0, 1), WorkerActivity(0, waiting_s, waiting_s, waiting_s=waiting_s, has_waiting=True))
    watched.watch.on_report(1, (0, 1), WorkerActivity(0, waiting_s=waiting_s))
    watched.watch.run_due(watched.now)


WRITES = replace(SLEEPS, silent_s=0.5)


def test_ranks_that_wait_for_one_that_only_writes_output_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    watched = Watched(monkeypatch, tmp_path, hang_timeout_s=60.0, busy_timeout_s=60.0)
    waiting(watched, 299.0)
    assert watched.sent == []
    waiting(watched, 300.0)
    watched.answer(WAITS, WRITES)
    assert watched.sent == [], "it is never ended"
    assert watched.shown[0].startswith(
        "no collective was called or finished for 5 min: ranks wait in one while others write output, "
        "as in a long evaluation or an endless loop"
    )
    assert watched.shown[1].startswith("  rank 1 never joined all_reduce #3 of default_pg")
    assert json.loads((tmp_path / "hang.json").read_text())["job_state"] == "busy"
    watched.now += 1000
    waiting(watched, 1300.0)
    assert watched.sent == []
    watched.shown.clear()
    waiting(watched, 0.0)
    assert watched.shown == ["collectives are called and finished again, after 21 min 40 s"]
    watched.now += 1000
    waiting(watched, 12_000.0)
    assert watched.sent == [], "the next wait must be ten times as long"
    waiting(watched, 13_001.0)
    assert len(watched.sent) == 1


def test_ranks_that_call_collectives_while_they_are_examined_are_not_reported(watched: Watched) -> None:
    waiting(watched, 300.0)
    watched.answer(WAITS, MOVES)
    assert watched.shown == []


def test_a_node_may_take_long_because_nothing_on_it_answers(watched: Watched) -> None:
    watched.quiet(300.0)
    watched.answer(WAITS)
    watched.now += 15
    watched.watch.run_due(watched.now)
    watched.watch.on_report(1, (0, 1), WorkersExamined(0, 1, (SLEEPS,)))
    assert watched.shown[0] == "nothing has moved for 5 min: the job seems to hang"


def test_reports_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, hang_report_s=None)
    watched.quiet(90000.0)
    assert watched.sent == []


def test_where_each_node_has_a_launcher_the_order_goes_to_all_nodes(
    monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    config = SimpleNamespace(timeouts=TimeoutConfig(), rendezvous=object())
    watched.watch = HangWatch(config, watched.sent.append, lambda: None, SimpleNamespace())  # type: ignore[arg-type]
    watched.quiet(300.0)
    assert watched.sent == [OrderToNodes(ExamineWorkers(0, 1))]


def test_a_job_that_moved_when_it_was_stopped_is_not_explained(watched: Watched) -> None:
    watched.watch.on_report(0, (0,), WorkersExamined(0, 0, (replace(WAITS, collectives_moved=True),)))
    watched.watch.show_stopped()
    assert not watched.shown


def test_what_the_ranks_did_before_the_user_stopped_the_job_is_shown(watched: Watched) -> None:
    watched.watch.on_report(0, (0, 1), WorkersExamined(0, 0, (WAITS,)))
    watched.watch.on_report(1, (0, 1), WorkersExamined(0, 0, (SLEEPS,)))
    watched.watch.show_stopped()
    assert watched.shown[0] == "when it was stopped:"
    assert watched.shown[1].startswith("  rank 1 never joined all_reduce #3")


def test_reports_that_come_together_are_judged_once(watched: Watched) -> None:
    """Each judgement passes over all nodes: one for each report would take minutes of CPU time with thousands."""
    watched.quiet(100.0)
    for index in (0, 1):
        watched.watch.on_report(index, (0, 1), WorkerActivity(0, 300.0, 300.0))
        assert watched.watch.run_due(watched.now) == watched.now + hang_watch._JUDGE_S
    assert watched.sent == []
    watched.now += hang_watch._JUDGE_S
    watched.watch.run_due(watched.now)
    assert watched.sent == [ExamineWorkers(0, 1)]


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
        watched, participants, CountedReport.looks = Watched(monkeypatch), range(nodes), 0
        for number in range(10):
            for index in participants:
                watched.watch.on_report(index, participants, CountedReport(0, 30.0 * number, 30.0 * number))
                watched.watch.run_due(watched.now)
            watched.now += 30.0
        return CountedReport.looks / nodes

    assert looks(1000) < 2 * looks(2)
