"""Of many exits the one that explains the others is named first, and its code is a shell's."""

from __future__ import annotations

import itertools

from ddplaunch.protocol import first_failure
from ddplaunch.protocol.results import WorkerError, WorkerExit
from tests.support import golden


def ended(text: str) -> WorkerExit:
    """A worker: rank, exit code, time, what it has asked for, whether it was stopped, and its exception."""
    rank, code, time_s, *words = text.split(" ")
    asked = {word: "no" for word in words if word in ("give_up", "avoid_node")}
    is_stopped = "stopped" in words
    message = " ".join(words[len(asked) + is_stopped :])
    error = WorkerError(message, "Traceback ...", float(time_s)) if message else None
    return WorkerExit(int(rank), 0, "node1", 7, int(code), is_stopped, float(time_s), 1.0, error, **asked)  # type: ignore[arg-type]


def test_who_failed_first_is_known_whatever_the_order_of_the_exits() -> None:
    """torchrun: errors_api_test 4. Those in brackets have lost a peer."""

    def order(question: str) -> str:
        exits = [*map(ended, question.split("; "))]
        orders = {tuple(first_failure.failures(each)) for each in itertools.permutations(exits)}
        (found,) = orders
        assert first_failure.first_failure(exits) == next(iter(found), None)
        ranks = (f"({each.rank})" if first_failure.is_consequence(each) else str(each.rank) for each in found)
        return ", ".join(ranks) or "nobody"

    golden.check_answers("first_failures", order)


def test_who_lost_a_peer_is_known_by_its_message() -> None:
    golden.check_answers("lost_peers", lambda text: "a lost peer" if first_failure.is_peer_loss(text) else "its own")


def test_an_end_has_the_exit_code_of_a_shell_and_is_told_by_name() -> None:
    def told(returncode: str) -> str:
        number = int(returncode)
        code = first_failure.exit_code(ended(f"0 {number} 1"))
        return f"{code}, {first_failure.describe(number)}: the worker {first_failure.ended(number)}"

    golden.check_answers("ends", told)
