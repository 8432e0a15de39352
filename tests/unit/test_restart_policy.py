"""A restart that cannot help is not tried; whatever may pass by itself is tried again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddplaunch.agent.rendezvous.single_node import SingleNodeRendezvous
from ddplaunch.protocol.results import AttemptResult, WorkerError, WorkerExit
from ddplaunch.rounds.verdict import (
    MAX_IDENTICAL_FAILURES,
    Restarts,
    reason_not_to_restart,
    why_not_used_again,
)
from tests.support import golden
from tests.support.configs import agent_spec

FRAMES = 'Traceback (most recent call last):\n  File "/x/train.py", line 9, in <module>\n    step(batch)\n'
CHAINED = f"{FRAMES}{{}}\n\nDuring handling of the above exception, another exception occurred:\n\n{FRAMES}{{}}\n"


def ended(message: str, traceback: str | None = None, duration_s: float = 1.0) -> WorkerExit:
    error = WorkerError(message, f"{FRAMES}{message}\n" if traceback is None else traceback, 100.0)
    return WorkerExit(0, 0, "node1", 1000, 1, stopped=False, time_s=100.0, duration_s=duration_s, error=error)


WRONG_KEY = ended("KeyError: 'x'")
KILLED = WorkerExit(0, 0, "node1", 1000, -9, stopped=False, time_s=100.0, duration_s=1.0)


# A script that cannot be parsed.

IN_THE_SCRIPT = '  File "/x/train.py", line 3\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
IN_A_TEXT = 'Traceback (most recent call last):\n  File "/x/train.py", line 9, in <module>\n' + IN_THE_SCRIPT


@pytest.mark.parametrize("kind", ["SyntaxError", "IndentationError", "TabError"])
def test_a_script_that_cannot_be_parsed_is_not_tried_again(kind: str) -> None:
    error = ended(f"{kind}: invalid syntax (train.py, line 3)", IN_THE_SCRIPT)
    assert reason_not_to_restart([error]) == "not restarted: the script cannot be parsed"
    assert reason_not_to_restart([WRONG_KEY, KILLED, error]) == "not restarted: the script cannot be parsed"


def test_whatever_else_fails_may_succeed_next_time() -> None:
    assert reason_not_to_restart([]) == reason_not_to_restart([None]) == reason_not_to_restart([KILLED]) == ""
    assert reason_not_to_restart([ended("ValueError: about a SyntaxError")]) == ""
    assert reason_not_to_restart([ended("SyntaxError: invalid syntax (train.py, line 3)", IN_A_TEXT)]) == ""
    assert reason_not_to_restart([ended("KeyError: 'x'", "")] * MAX_IDENTICAL_FAILURES) == "", "nobody knows where"


# The same error again and again.


def after(*causes: WorkerExit | None, limit: int = 99) -> Restarts:
    """After rounds that ended by these, each followed by a restart but the last."""
    restarts = Restarts(limit, count=len(causes) - 1)
    for cause in causes:
        restarts.note(cause)
    return restarts


def test_the_limit_counts_more_than_whether_a_restart_could_help() -> None:
    assert after(KILLED, KILLED, limit=2).why_none == ""
    assert after(*[WRONG_KEY] * 3, limit=2).why_none == "not restarted: 2 of 2 restarts used"
    assert after(KILLED, limit=0).why_none == "not restarted: --max-restarts is 0"


def test_the_same_error_of_three_attempts_in_a_row_is_enough() -> None:
    """resilience 3.2 #22."""
    attempts = [ended("KeyError: 'x'", duration_s=duration_s) for duration_s in (0.51, 3.32, 0.04)]
    assert reason_not_to_restart(attempts) == (
        "not restarted again: 3 attempts in a row ended by the same exception at the same place, "
        "each within 3.4 s of its start"
    )
    assert reason_not_to_restart(attempts[1:]) == ""
    assert after(None, KILLED, *attempts).why_none
    assert after(*attempts, KILLED).why_none == ""


def test_a_mistake_of_the_program_stays_and_all_else_may_pass_by_itself() -> None:
    """A question is how three attempts have ended."""

    def answer(message: str) -> str:
        shown = message.removesuffix(": ")  # As Python shows one without a text.
        reason = reason_not_to_restart([ended(message, f"{FRAMES}{shown}\n")] * MAX_IDENTICAL_FAILURES)
        return "not restarted" if reason else "restarted"

    golden.check_answers("restarts_after", answer)


def test_a_mistake_that_led_to_another_or_came_from_a_loaders_process_stays() -> None:
    chained = CHAINED.format("KeyError: 'x'", "ValueError: no x")
    assert reason_not_to_restart([ended("ValueError: no x", chained)] * MAX_IDENTICAL_FAILURES)
    from_loader = f"KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal {FRAMES}KeyError: 'x'\n"
    assert reason_not_to_restart([ended(from_loader)] * MAX_IDENTICAL_FAILURES)


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("ConnectionError: no route", "KeyError: 'answer'"),
        ("requests.exceptions.ReadTimeout: 30 s", "AttributeError: 'NoneType' object has no attribute 'json'"),
        ("RuntimeError: CUDA error: unspecified launch failure", "ValueError: step 3 failed"),
    ],
)
def test_a_mistake_that_something_else_led_to_may_pass(first: str, last: str) -> None:
    assert reason_not_to_restart([ended(last, CHAINED.format(first, last))] * MAX_IDENTICAL_FAILURES) == ""


@pytest.mark.parametrize(
    "other",
    [
        None,
        KILLED,
        ended("KeyError: 'y'"),
        ended("KeyError: 'x'", f"{FRAMES.replace('line 9', 'line 10')}KeyError: 'x'\n"),
        ended("KeyError: 'x'", ""),
        ended("KeyError: 'x'", duration_s=300.1),
    ],
    ids=["no failure", "no error", "another message", "another place", "unknown place", "after long work"],
)
@pytest.mark.parametrize("place", range(MAX_IDENTICAL_FAILURES))
def test_an_attempt_that_ended_otherwise_starts_the_count_anew(other: WorkerExit | None, place: int) -> None:
    attempts = [WRONG_KEY] * MAX_IDENTICAL_FAILURES
    attempts[place : place + 1] = [other]
    assert reason_not_to_restart(attempts) == ""


# Nodes that must not be used again.

BROKEN = replace(KILLED, rank=11, host="gpu3", hardware="Xid 79, GPU 3 (GPU-8f6a) has fallen off the bus")
ASKED = replace(KILLED, rank=5, host="gpu3", avoid_node="the loss differs on this node")


def test_a_node_is_left_for_its_hardware_or_for_a_wish_of_the_script() -> None:
    assert why_not_used_again([KILLED, ASKED]) == (
        "gpu3 is not used again: rank 5 asks for it: the loss differs on this node"
    )
    assert why_not_used_again([ASKED, BROKEN]) == (
        "gpu3 is not used again: Xid 79, GPU 3 (GPU-8f6a) has fallen off the bus"
    )
    assert why_not_used_again([]) == why_not_used_again([KILLED, WRONG_KEY]) == ""


@pytest.mark.parametrize(("exit_", "leaves"), [(BROKEN, True), (ASKED, True), (KILLED, False)])
def test_a_single_node_is_not_used_again_either(exit_: WorkerExit, leaves: bool) -> None:
    rendezvous = SingleNodeRendezvous(agent_spec(max_restarts=3), 1, lambda: False)
    round_, listener = rendezvous.next_round()
    listener.close()
    result = rendezvous.finish_round(AttemptResult(round_.attempt, "failed", (exit_,), 1.0), has_unkillable=False)
    assert result.attempt_follows == (not leaves)
    assert bool(result.node_leaves) == leaves
    assert result.decision.endswith("; there is no other node") == leaves


# What the script has asked for.


def test_who_gives_up_is_not_started_again() -> None:
    gone = replace(KILLED, give_up="the loss is nan\x1b")
    assert reason_not_to_restart([gone]) == r"not restarted: rank 0 on node1 gave up: the loss is nan\x1b"
    assert reason_not_to_restart([gone, KILLED]) == ""


def test_a_node_to_avoid_does_not_prevent_a_restart() -> None:
    assert reason_not_to_restart([replace(KILLED, avoid_node="wrong sums")]) == ""
