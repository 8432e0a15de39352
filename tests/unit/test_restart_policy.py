"""A restart that cannot help is not tried; whatever may pass by itself is tried again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddplaunch.agent.rendezvous.single_node import SingleNodeRendezvous
from ddplaunch.protocol.results import AttemptResult, WorkerError, WorkerExit
from ddplaunch.rounds.restarts import Restarts, why_restart_cannot_help
from ddplaunch.rounds.verdicts import why_not_used_again
from tests.support import golden
from tests.support.configs import agent_spec

FRAMES = 'Traceback (most recent call last):\n  File "/x/train.py", line 9, in <module>\n    step(batch)\n'
CHAINED = f"{FRAMES}{{}}\n\nDuring handling of the above exception, another exception occurred:\n\n{FRAMES}{{}}\n"
FROM_LOADER = f"KeyError: Caught KeyError in DataLoader worker process 0.\nOriginal {FRAMES}KeyError: 'x'\n"
IN_THE_SCRIPT = '  File "/x/train.py", line 3\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
IN_A_TEXT = 'Traceback (most recent call last):\n  File "/x/train.py", line 9, in <module>\n' + IN_THE_SCRIPT


def ended(message: str, traceback: str | None = None, duration_s: float = 1.0) -> WorkerExit:
    error = WorkerError(message, f"{FRAMES}{message}\n" if traceback is None else traceback, 100.0)
    return WorkerExit(0, 0, "node1", 1000, 1, stopped=False, time_s=100.0, duration_s=duration_s, error=error)


def chained(first: str, last: str) -> list[WorkerExit]:
    return [ended(last, CHAINED.format(first, last))] * 3


WRONG_KEY = ended("KeyError: 'x'")
KILLED = WorkerExit(0, 0, "node1", 1000, -9, stopped=False, time_s=100.0, duration_s=1.0)
GONE = replace(KILLED, give_up="the loss is nan\x1b")
NOT_PARSED = ended("SyntaxError: invalid syntax (train.py, line 3)", IN_THE_SCRIPT)
OTHERS = {
    "no failure": None,
    "no error": KILLED,
    "another message": ended("KeyError: 'y'"),
    "another place": ended("KeyError: 'x'", f"{FRAMES.replace('line 9', 'line 10')}KeyError: 'x'\n"),
    "unknown place": ended("KeyError: 'x'", ""),
    "after long work": ended("KeyError: 'x'", duration_s=300.1),
}
CAUSES: dict[str, list[WorkerExit | None]] = {
    "the script cannot be parsed": [NOT_PARSED],
    "its indentation is wrong": [ended("IndentationError: unexpected indent (train.py, line 3)", IN_THE_SCRIPT)],
    "its tabs are wrong": [ended("TabError: inconsistent use (train.py, line 3)", IN_THE_SCRIPT)],
    "it cannot be parsed any more": [WRONG_KEY, KILLED, NOT_PARSED],
    "a text cannot be parsed": [ended("SyntaxError: invalid syntax (train.py, line 3)", IN_A_TEXT)],
    "a message names a SyntaxError": [ended("ValueError: about a SyntaxError")],
    "nothing": [],
    "one failure": [WRONG_KEY],
    "the same error three times": [ended("KeyError: 'x'", duration_s=time_s) for time_s in (0.51, 3.32, 0.04)],
    "the same error twice": [WRONG_KEY] * 2,
    "the same error three times, nobody knows where": [ended("KeyError: 'x'", "")] * 3,
    "a mistake that led to another": [*chained("KeyError: 'x'", "ValueError: no x")],
    "a mistake in a loader's process": [ended(FROM_LOADER)] * 3,
    "a mistake after a lost connection": [*chained("ConnectionError: no route", "KeyError: 'answer'")],
    "a mistake after a time-out": [*chained("requests.exceptions.ReadTimeout: 30 s", "AttributeError: no attribute")],
    "a mistake after an error of the GPU": [*chained("RuntimeError: CUDA error: launch failure", "ValueError: no")],
    "a script that gives up": [GONE],
    "a script that gave up before": [GONE, KILLED],
    "a script that asks for another node": [replace(KILLED, avoid_node="wrong sums")],
    **{
        f"three times, but {name} in attempt {place}": [WRONG_KEY] * place + [other] + [WRONG_KEY] * (2 - place)
        for name, other in OTHERS.items()
        for place in range(3)
    },
}


def test_what_cannot_help_is_not_tried() -> None:
    """resilience 3.2 #22."""
    answers = {name: why_restart_cannot_help(each) or "restarted" for name, each in CAUSES.items()}
    golden.check("restart_policy", answers)


def test_a_mistake_of_the_program_stays_and_all_else_may_pass_by_itself() -> None:
    """A question is how three attempts have ended."""

    def answer(message: str) -> str:
        shown = message.removesuffix(": ")  # As Python shows one without a text.
        return "not restarted" if why_restart_cannot_help([ended(message, f"{FRAMES}{shown}\n")] * 3) else "restarted"

    golden.check_answers("restarts_after", answer)


@pytest.mark.parametrize(
    ("causes", "limit", "why"),
    [
        ([KILLED] * 2, 2, ""),
        ([WRONG_KEY] * 3, 2, "not restarted: 2 of 2 restarts used"),
        ([KILLED], 0, "not restarted: --max-restarts is 0"),
        ([None, KILLED, *[WRONG_KEY] * 3], 9, why_restart_cannot_help([WRONG_KEY] * 3)),
        ([*[WRONG_KEY] * 3, KILLED], 9, ""),
    ],
)
def test_the_limit_counts_more_than_whether_a_restart_could_help(
    causes: list[WorkerExit | None], limit: int, why: str
) -> None:
    """Each cause but the last was followed by a restart."""
    restarts = Restarts(limit, restart_count=len(causes) - 1)
    for cause in causes:
        restarts.note(cause)
    assert restarts.why_no_restart == why


# Nodes that must not be used again.

BROKEN = replace(KILLED, rank=11, host="gpu3", hardware="Xid 79, GPU 3 (GPU-8f6a) has fallen off the bus")
ASKED = replace(KILLED, rank=5, host="gpu3", avoid_node="the loss differs on this node")


def test_a_node_is_left_for_its_hardware_or_for_a_wish_of_the_script() -> None:
    left = "gpu3 is not used again: "
    assert why_not_used_again([KILLED, ASKED]) == f"{left}rank 5 asks for it: the loss differs on this node"
    assert why_not_used_again([ASKED, BROKEN]) == f"{left}Xid 79, GPU 3 (GPU-8f6a) has fallen off the bus"
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


# What the rounds have saved.

DISK = "OSError: [Errno 28] No space left on device"


def policy(*rounds: tuple[WorkerExit | None, str | None]) -> Restarts:
    """After rounds that have ended so, the job having begun without anything."""
    restarts = Restarts(100)
    restarts.saved = ""
    for cause, saved in rounds:
        restarts.note(cause, saved)
    return restarts


@pytest.mark.parametrize(
    ("rounds", "is_over"),
    [
        ([(WRONG_KEY, "a"), (WRONG_KEY, "b"), (WRONG_KEY, "c"), (WRONG_KEY, "d")], False),
        ([(WRONG_KEY, "a"), (WRONG_KEY, "a"), (WRONG_KEY, "a")], False),
        ([(WRONG_KEY, "a"), (WRONG_KEY, "a"), (WRONG_KEY, "a"), (WRONG_KEY, "a")], True),
        ([(WRONG_KEY, "")] * 3, True),
        ([(ended(DISK), "")] * 3, True),
        ([(KILLED, "")] * 3, True),
        ([(replace(KILLED, duration_s=9999.0), "")] * 3, True),
        ([(ended(f"RuntimeError: step {n} at 0x7f{n}: the loss is nan"), "") for n in (1, 20, 3)], True),
        ([(ended(DISK), ""), (KILLED, ""), (ended(DISK), "")], False),
        ([(KILLED, ""), (None, ""), (KILLED, "")], False),
        ([(ended("ConnectionError: Connection closed by peer"), "")] * 3, False),
        ([(ended(DISK), None)] * 3, False),
        ([(WRONG_KEY, None)] * 3, True),
        ([(ended(DISK), ""), (ended(DISK), None), (ended(DISK), "")], False),
    ],
)
def test_attempts_that_save_something_go_on_and_others_end_when_they_fail_alike(
    rounds: list[tuple[WorkerExit | None, str | None]], is_over: bool
):
    """With a lost node (no cause), or while nobody knows what was saved (None), other rules hold."""
    assert bool(policy(*rounds).why_no_restart) == is_over


@pytest.mark.parametrize(
    ("rounds", "is_suspect"),
    [
        ([(KILLED, "a"), (KILLED, "a")], False),
        ([(KILLED, "a"), (KILLED, "a"), (ended(DISK), "a")], True),
        ([(KILLED, "a"), (KILLED, "a"), (replace(KILLED, duration_s=301.0), "a")], False),
        ([(KILLED, "a"), (KILLED, "a"), (None, "a")], False),
        ([(KILLED, "a"), (KILLED, "a"), (KILLED, "b")], False),
        ([(KILLED, ""), (KILLED, "")], False),
        ([(KILLED, None), (KILLED, None)], False),
        ([(KILLED, "a"), (GONE, "a"), (GONE, "a")], False),
    ],
)
def test_a_saved_state_is_suspect_after_two_attempts_that_begin_from_it_and_soon_fail(
    rounds: list[tuple[WorkerExit | None, str | None]], is_suspect: bool
):
    assert policy(*rounds).saved_is_suspect == is_suspect
