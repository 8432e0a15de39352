"""What is told at the end of a run of each injected failure, and when a line counts as printed."""

from __future__ import annotations

from ddplaunch.features.faults.fault_spec import parse
from ddplaunch.features.faults.launcher import Fault, describe_effect, with_line_search
from ddplaunch.protocol.launcher_agent import Output
from ddplaunch.protocol.results import AttemptResult, Outcome
from ddplaunch.protocol.run_result import Injected, RunResult
from tests.support import golden


def result(exit_code: int, *outcomes: Outcome, signal: str | None = None) -> RunResult:
    """A run whose attempts ended like this after 2 s each."""
    last = len(outcomes) - 1
    attempts = tuple(AttemptResult(i, each, (), 2.0, attempt_follows=i < last) for i, each in enumerate(outcomes))
    outcome: Outcome = "stopped" if signal else "failed" if exit_code else "succeeded"
    return RunResult("r1", exit_code, outcome, 9.0, attempts, signal=signal)


RECOVERED = result(0, "failed", "succeeded")
SUCCEEDED = result(0, "succeeded")


def done(text: str, run: RunResult, starts: dict[int, float]) -> str:
    """Of an injection that happened half a second after the start of its attempt."""
    injection = parse(text)
    started_at = starts[injection.attempt]
    case = Fault(injection, "node1", started_at, started_at + 0.4, started_at + 0.5)
    told = describe_effect(case, starts, run)
    assert told == Injected(text, 0.5, told.account)
    return told.account


LATER = {0: 100.0, 1: 101.25}
DEEDS = (
    *("kill rank=3", "exit rank=3 code=7", "hang rank=3", "slow rank=3 by=10x", "lose node=1"),
    *("partition node=1 for=3s", "partition node=1", "crash agent node=1"),
)
RUNS = {
    "it went on": (SUCCEEDED, {0: 1.0}),
    "it failed": (result(9, "failed"), {0: 1.0}),
    "a node was lost": (result(84), {0: 1.0}),
    "the next attempt failed": (result(7, "failed", "failed"), {0: 1.0, 1: 2.0}),
    "the user stopped it": (result(130, "stopped", signal="SIGINT"), {0: 1.0}),
}
NOT_DONE = (
    ("kill rank=3 attempt=2", {}, RECOVERED),
    ("kill rank=3 attempt=1", {}, RECOVERED),
    ("lose node=1 attempt=1", {}, RECOVERED),
    ("kill rank=3 after=1m", {"started_at": 1.0}, SUCCEEDED),
    ("kill rank=3 after=1m", {"started_at": 1.0}, result(84)),
    ("hang rank=3", {"started_at": 1.0, "tried_at": 1.0}, SUCCEEDED),
    ("hang rank=3 after-line=x", {"started_at": 1.0}, SUCCEEDED),
)


def not_done(text: str, case: dict[str, float], run: RunResult) -> str:
    told = describe_effect(Fault(parse(text), "node1", **case), {0: 1.0, 1: 2.0}, run)
    assert told == Injected(text, None, told.account)
    return f"{text}: {told.account}"


def test_what_happened_how_the_job_answered_and_what_did_not_happen_is_told():
    pages = {
        "deeds": [done(text, RECOVERED, LATER) for text in DEEDS],
        "answers": [f"{name}: {done('kill rank=3', run, starts)}" for name, (run, starts) in RUNS.items()],
        "not done": [not_done(*case) for case in NOT_DONE],
    }
    golden.check("fault_effects", {name: "\n".join(lines) for name, lines in pages.items()})


# Lines.


def seen(text: str, *chunks: tuple[Output, bytes]) -> list[object]:
    """The faults whose line is in these chunks, and its host; all chunks must go on to the console."""
    found: list[object] = []
    shown: list[tuple[Output, bytes]] = []
    output = with_line_search(
        [parse("kill rank=9 after=1s"), parse(text)],
        lambda *chunk: shown.append(chunk),
        lambda *line: found.append(line),
    )
    for chunk in chunks:
        output(*chunk)
    assert shown == list(chunks)
    return found


def header(rank: int = 3, attempt: int = 0) -> Output:
    return Output("node1", rank, 0, "stdout", 0, attempt=attempt)


def test_nobody_looks_at_lines_that_nothing_waits_for():
    output = lambda header, data: None  # noqa: E731
    assert with_line_search([parse("kill rank=3")], output, print) is output


def test_a_line_counts_once_and_from_that_rank_in_that_attempt():
    wanted = "kill rank=3 attempt=1 after-line='epoch 1'"
    assert seen(wanted, (header(2, 1), b"epoch 1\n"), (header(3, 0), b"epoch 1\n"), (header(3, 1), b"epoch 2\n")) == []
    assert seen(wanted, (header(3, 1), b"a\nepoch 1 b\n"), (header(3, 1), b"epoch 1\n")) == [(1, "node1")]


def test_any_rank_of_a_node_may_print_it():
    assert seen("lose node=1 after-line=epoch", (header(7), b"the epoch\n")) == [(1, "node1")]


def test_a_line_may_come_in_pieces_but_two_lines_are_not_one():
    wanted = "kill rank=3 after-line='epoch 1'"
    assert seen(wanted, (header(), b"x\nepo"), (header(), b"ch 1")) == [(1, "node1")]
    assert seen(wanted, (header(), b"epo\n"), (header(), b"ch 1\n")) == []
    assert seen(wanted, (header(), b"epo"), (header(2), b"ch 1\n")) == []
