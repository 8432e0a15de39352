"""What nodes tell of an attempt becomes one result, whatever the order, and whoever is lost on the way."""

from __future__ import annotations

from dataclasses import replace

from ddplaunch.launcher.attempts import Attempts
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from tests.support.fake_agents import unexplained


def exit_(rank: int, returncode: int = 0) -> WorkerExit:
    return WorkerExit(rank, 0, f"node{rank}", 1, returncode, stopped=False, time_s=0.0, duration_s=1.0)


RESTARTS = {"outcome": "failed", "attempt_follows": True, "restart_follows": True}


def result(number: int, rank: int, **fields: object) -> AttemptResult:
    given = {"attempt": number, "outcome": "succeeded", "exits": (exit_(rank),), "duration_s": 1.0}
    return AttemptResult(**{**given, **fields})  # type: ignore[arg-type]


def test_one_result_of_all_nodes_in_the_order_of_ranks():
    attempts = Attempts(unexplained)
    assert attempts.on_started(0, 0, [0, 1]) == (True, [])
    assert attempts.on_started(1, 0, [0, 1]) == (False, [])
    assert attempts.on_ended(1, result(0, rank=1, duration_s=3.0), [0, 1]) == []
    [whole] = attempts.on_ended(0, result(0, rank=0), [0, 1])
    assert ([each.rank for each in whole.exits], whole.outcome, whole.duration_s) == ([0, 1], "succeeded", 3.0)
    assert attempts.ended == [whole]


def test_a_failure_on_one_node_is_the_attempts():
    attempts = Attempts(unexplained)
    failed = result(0, rank=1, **RESTARTS, cause=exit_(1, 7))
    attempts.on_ended(0, result(0, rank=0, outcome="stopped", attempt_follows=True, reason="told to"), [0, 1])
    [whole] = attempts.on_ended(1, failed, [0, 1])
    assert (whole.outcome, whole.attempt_follows, whole.cause, whole.reason) == ("failed", True, exit_(1, 7), "told to")
    assert attempts.restarts_so_far == 1


def test_what_the_nodes_have_sent_with_their_results_explains_the_whole():
    attempts = Attempts(lambda result, evidence: replace(result, reason=" and ".join(map(str, evidence))))
    attempts.on_ended(0, result(0, rank=0, outcome="failed"), [0, 1], ["one"])  # type: ignore[list-item]
    [whole] = attempts.on_ended(1, result(0, rank=1, outcome="stopped"), [0, 1], ["the other"])  # type: ignore[list-item]
    assert whole.reason == "one and the other"


def test_a_lost_node_is_not_waited_for():
    attempts = Attempts(unexplained)
    attempts.on_started(0, 0, [0, 1])
    assert attempts.on_ended(0, result(0, rank=0), [0, 1]) == []
    assert [each.attempt for each in attempts.remove_node(1)] == [0]


def test_whoever_is_in_the_next_attempt_has_left_the_last():
    """As when a node that was lost before the attempt began was counted among those that take part."""
    attempts = Attempts(unexplained)
    attempts.on_started(0, 0, [0, 7])
    attempts.on_ended(0, result(0, rank=0, attempt_follows=True, outcome="stopped"), [0, 7])
    is_first, completed = attempts.on_started(0, 1, [0, 2])
    assert is_first
    assert [each.attempt for each in completed] == [0]
    assert attempts.next_number == 2
    assert attempts.on_ended(7, result(0, rank=1), [0, 2]) == [], "what comes too late counts no more"


def test_a_report_that_another_node_overtakes_still_counts():
    attempts = Attempts(unexplained)
    attempts.on_started(0, 0, [0, 1])
    attempts.on_ended(0, result(0, rank=0, outcome="stopped", attempt_follows=True), [0, 1])
    assert attempts.on_started(0, 1, [0, 1]) == (True, [])
    [whole] = attempts.on_ended(1, result(0, rank=1, outcome="failed", attempt_follows=True), [0, 1])
    assert ([each.rank for each in whole.exits], whole.outcome) == ([0, 1], "failed")


def test_a_node_in_the_next_attempt_has_nothing_left_to_report_of_the_last():
    """As one that was to take part in the last attempt, and joined too late for it."""
    attempts = Attempts(unexplained)
    attempts.on_started(0, 0, [0, 1])
    attempts.on_ended(0, result(0, rank=0, outcome="stopped", attempt_follows=True), [0, 1])
    assert [each.attempt for each in attempts.on_started(1, 1, [0, 1])[1]] == [0]


def test_a_round_that_ended_because_a_node_joined_is_no_restart():
    attempts = Attempts(unexplained)
    attempts.on_ended(0, result(0, rank=0, outcome="stopped", attempt_follows=True), [0])
    assert attempts.restarts_so_far == 0
    attempts.on_ended(0, result(1, rank=0, **RESTARTS), [0])
    attempts.on_ended(0, result(2, rank=0, outcome="failed"), [0])
    assert attempts.restarts_so_far == 1


def test_a_restart_counts_whichever_node_tells_of_it_first():
    """The others may have lost the rendezvous before they heard of it."""
    attempts = Attempts(unexplained)
    attempts.on_ended(0, result(0, rank=0, outcome="stopped", attempt_follows=True), [0, 1, 2])
    assert attempts.restarts_so_far == 0
    attempts.on_ended(1, result(0, rank=1, **RESTARTS), [0, 1, 2])
    assert attempts.restarts_so_far == 1


def test_at_the_end_what_is_known_counts():
    attempts = Attempts(unexplained)
    attempts.on_started(0, 0, [0, 1])
    part = result(0, rank=0)
    attempts.on_ended(0, part, [0, 1])
    assert attempts.close() == [part]
    assert attempts.close() == []
    attempts.on_started(0, 1, [0, 1])
    assert attempts.close() == [], "of which nobody has told anything"


def test_a_lone_nodes_result_is_its_own():
    attempts = Attempts(unexplained)
    alone = replace(result(0, rank=0), reason="as it was")
    assert attempts.on_ended(0, alone, [0]) == [alone]


def test_one_node_that_tells_of_the_end_decides():
    attempts = Attempts(unexplained)
    attempts.on_ended(0, result(0, rank=0, attempt_follows=True), [0, 1])
    assert not attempts.outcome_is_known
    attempts.on_ended(0, result(1, rank=0), [0, 1])
    assert attempts.outcome_is_known


def test_the_verdict_holds_for_a_node_too_that_lost_the_rendezvous_before_it_heard_it() -> None:
    """On a slow link the node that serves may be gone by then."""
    attempts, seats = Attempts(unexplained), [0, 1]
    attempts.on_started(0, 0, seats)
    attempts.on_ended(
        1, result(0, rank=1, outcome="stopped", attempt_follows=True, reason="the rendezvous is lost"), seats
    )
    attempts.on_ended(0, result(0, rank=0, outcome="failed", cause=exit_(0, 7)), seats)
    (ended,) = attempts.ended
    assert (ended.outcome, ended.attempt_follows, ended.reason) == ("failed", False, "")
    assert ended.cause == exit_(0, 7)
    assert attempts.restarts_so_far == 0
