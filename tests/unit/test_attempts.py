"""What nodes tell of an attempt becomes one result, whatever the order, and whoever is lost on the way."""

from __future__ import annotations

from dataclasses import replace

from ddplaunch.launcher.attempts import Attempts
from ddplaunch.protocol.results import AttemptResult, WorkerError, WorkerExit
from tests.support.hangs import call, done, evidence


def exit_(rank: int, returncode: int = 0) -> WorkerExit:
    return WorkerExit(rank, 0, f"node{rank}", 1, returncode, stopped=False, time_s=0.0, duration_s=1.0)


RESTARTS = {"outcome": "failed", "attempt_follows": True, "restart_follows": True}


def result(number: int, rank: int, **fields: object) -> AttemptResult:
    given = {"attempt": number, "outcome": "succeeded", "exits": (exit_(rank),), "duration_s": 1.0}
    return AttemptResult(**{**given, **fields})  # type: ignore[arg-type]


def test_one_result_of_all_nodes_in_the_order_of_ranks():
    attempts = Attempts()
    assert attempts.on_started(0, 0, [0, 1]) == (True, [])
    assert attempts.on_started(1, 0, [0, 1]) == (False, [])
    assert attempts.on_ended(1, result(0, rank=1, duration_s=3.0), [0, 1]) == []
    [whole] = attempts.on_ended(0, result(0, rank=0), [0, 1])
    assert ([each.rank for each in whole.exits], whole.outcome, whole.duration_s) == ([0, 1], "succeeded", 3.0)
    assert attempts.ended == [whole]


def test_a_failure_on_one_node_is_the_attempts():
    attempts = Attempts()
    failed = result(0, rank=1, **RESTARTS, cause=exit_(1, 7))
    attempts.on_ended(0, result(0, rank=0, outcome="stopped", attempt_follows=True, reason="told to"), [0, 1])
    [whole] = attempts.on_ended(1, failed, [0, 1])
    assert (whole.outcome, whole.attempt_follows, whole.cause, whole.reason) == ("failed", True, exit_(1, 7), "told to")
    assert attempts.restart_count == 1


def test_what_the_nodes_knew_of_a_failed_collective_is_explained_together():
    attempts = Attempts()
    lost = replace(exit_(0, 1), error=WorkerError("Timed out waiting 3000ms for recv operation", "", 1.0))
    waits = evidence(0, [*done(5), call(6)], world=2, is_running=False, window_s=0.0)
    is_late = evidence(1, done(5), world=2, host="gpu1", window_s=0.0, where="train.py:9 in load")
    attempts.on_ended(0, replace(result(0, rank=0, outcome="failed"), exits=(lost,)), [0, 1], [waits])
    [whole] = attempts.on_ended(1, result(0, rank=1, outcome="stopped"), [0, 1], [is_late])
    assert whole.collectives[0] == "rank 1 on gpu1 never joined all_reduce #6 of default_pg (3 floats)"
    assert whole.collectives[-1] == "rank 1 is at train.py:9 in load"


def test_where_ranks_waited_is_known_when_a_node_is_lost():
    attempts = Attempts()
    attempts.on_started(0, 0, [0, 1])
    waits = evidence(0, [*done(5), call(6)], world=2, is_running=True, window_s=0.0, where="train.py:7")
    attempts.on_ended(0, result(0, rank=0, outcome="stopped"), [0, 1], [waits])
    [whole] = attempts.remove_node(1)
    assert whole.collectives == ("rank 0 waited in all_reduce #6 of default_pg (3 floats) since 14:47:37 (train.py:7)",)


def test_sentences_of_an_agent_are_not_believed():
    assert Attempts().on_ended(0, result(0, rank=0, collectives=("made up",)), [0])[0].collectives == ()


def test_a_lost_node_is_not_waited_for():
    attempts = Attempts()
    attempts.on_started(0, 0, [0, 1])
    assert attempts.on_ended(0, result(0, rank=0), [0, 1]) == []
    assert [each.attempt for each in attempts.remove_node(1)] == [0]


def test_whoever_is_in_the_next_attempt_has_left_the_last():
    """As when a node that was lost before the attempt began was counted among those that take part."""
    attempts = Attempts()
    attempts.on_started(0, 0, [0, 7])
    attempts.on_ended(0, result(0, rank=0, attempt_follows=True, outcome="stopped"), [0, 7])
    is_first, completed = attempts.on_started(0, 1, [0, 2])
    assert is_first
    assert [each.attempt for each in completed] == [0]
    assert attempts.next_number == 2
    assert attempts.on_ended(7, result(0, rank=1), [0, 2]) == [], "what comes too late counts no more"


def test_a_report_that_another_node_overtakes_still_counts():
    attempts = Attempts()
    attempts.on_started(0, 0, [0, 1])
    attempts.on_ended(0, result(0, rank=0, outcome="stopped", attempt_follows=True), [0, 1])
    assert attempts.on_started(0, 1, [0, 1]) == (True, [])
    [whole] = attempts.on_ended(1, result(0, rank=1, outcome="failed", attempt_follows=True), [0, 1])
    assert ([each.rank for each in whole.exits], whole.outcome) == ([0, 1], "failed")


def test_a_node_in_the_next_attempt_has_nothing_left_to_report_of_the_last():
    """As one that was to take part in the last attempt, and joined too late for it."""
    attempts = Attempts()
    attempts.on_started(0, 0, [0, 1])
    attempts.on_ended(0, result(0, rank=0, outcome="stopped", attempt_follows=True), [0, 1])
    assert [each.attempt for each in attempts.on_started(1, 1, [0, 1])[1]] == [0]


def test_a_round_that_ended_because_a_node_joined_is_no_restart():
    attempts = Attempts()
    attempts.on_ended(0, result(0, rank=0, outcome="stopped", attempt_follows=True), [0])
    assert attempts.restart_count == 0
    attempts.on_ended(0, result(1, rank=0, **RESTARTS), [0])
    attempts.on_ended(0, result(2, rank=0, outcome="failed"), [0])
    assert attempts.restart_count == 1


def test_a_restart_counts_whichever_node_tells_of_it_first():
    """The others may have lost the rendezvous before they heard of it."""
    attempts = Attempts()
    attempts.on_ended(0, result(0, rank=0, outcome="stopped", attempt_follows=True), [0, 1, 2])
    assert attempts.restart_count == 0
    attempts.on_ended(1, result(0, rank=1, **RESTARTS), [0, 1, 2])
    assert attempts.restart_count == 1


def test_at_the_end_what_is_known_counts():
    attempts = Attempts()
    attempts.on_started(0, 0, [0, 1])
    part = result(0, rank=0)
    attempts.on_ended(0, part, [0, 1])
    assert attempts.close() == [part]
    assert attempts.close() == []
    attempts.on_started(0, 1, [0, 1])
    assert attempts.close() == [], "of which nobody has told anything"


def test_a_lone_nodes_result_is_its_own():
    attempts = Attempts()
    alone = replace(result(0, rank=0), reason="as it was")
    assert attempts.on_ended(0, alone, [0]) == [alone]


def test_one_node_that_tells_of_the_end_decides():
    attempts = Attempts()
    attempts.on_ended(0, result(0, rank=0, attempt_follows=True), [0, 1])
    assert not attempts.outcome_is_known
    attempts.on_ended(0, result(1, rank=0), [0, 1])
    assert attempts.outcome_is_known


def test_the_verdict_holds_for_a_node_too_that_lost_the_rendezvous_before_it_heard_it() -> None:
    """On a slow link the node that serves may be gone by then."""
    attempts, seats = Attempts(), [0, 1]
    attempts.on_started(0, 0, seats)
    attempts.on_ended(
        1, result(0, rank=1, outcome="stopped", attempt_follows=True, reason="the rendezvous is lost"), seats
    )
    attempts.on_ended(0, result(0, rank=0, outcome="failed", cause=exit_(0, 7)), seats)
    (ended,) = attempts.ended
    assert (ended.outcome, ended.attempt_follows, ended.reason) == ("failed", False, "")
    assert ended.cause == exit_(0, 7)
    assert attempts.restart_count == 0
