"""What nodes tell of an attempt becomes one result, whatever the order, and whoever is lost on the way."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddplaunch.launcher.attempts import Attempts
from ddplaunch.protocol.launcher_agent import Report
from ddplaunch.protocol.results import AttemptResult, WorkerExit
from tests.support import golden


def exit_(node: int, returncode: int = 0) -> WorkerExit:
    return WorkerExit(node, 0, f"node{node}", 1, returncode, stopped=False, time_s=0.0, duration_s=1.0)


def told(result: AttemptResult) -> str:
    ranks = ",".join(str(each.rank) for each in result.exits)
    follows = "a restart follows" if result.restart_follows else "another follows" if result.attempt_follows else "last"
    causes = [f"because of rank {result.cause.rank}"] if result.cause else []
    what = f"attempt {result.attempt} of ranks {ranks}: {result.outcome} in {result.duration_s:g} s"
    return "; ".join([what, follows, *causes, *filter(None, [result.reason])])


def explained(result: AttemptResult, evidence: Sequence[Report]) -> AttemptResult:
    return replace(result, reason=" and ".join(map(str, evidence)) or result.reason)


class Launcher:
    """Its methods are the steps of a story; the last argument is the nodes that take part."""

    def __init__(self) -> None:
        self.attempts = Attempts(explained)

    def start(self, node: str, attempt: str, nodes: str) -> list[str]:
        is_first, completed = self.attempts.on_started(int(node), int(attempt), [*map(int, nodes)])
        return ["first"] * is_first + [*map(told, completed)]

    def end(self, node: str, attempt: str, outcome: str, *words: str) -> list[str]:
        """``words``: what follows, ``cause``, and values of fields."""
        *facts, nodes = words
        given = dict(fact.split("=", 1) for fact in facts if "=" in fact)
        result = AttemptResult(
            int(attempt),
            outcome,  # type: ignore[arg-type]
            (exit_(int(node)),),
            duration_s=float(given.get("duration_s", 1)),
            reason=given.get("reason", ""),
            cause=exit_(int(node), 7) if "cause" in facts else None,
            attempt_follows=bool({"follows", "restarts"} & {*facts}),
            restart_follows="restarts" in facts,
        )
        evidence: Any = [given["knows"]] if "knows" in given else []
        return [*map(told, self.attempts.on_ended(int(node), result, [*map(int, nodes)], evidence))]

    def lose(self, node: str) -> list[str]:
        return [*map(told, self.attempts.remove_node(int(node)))]

    def close(self) -> list[str]:
        return [*map(told, self.attempts.close())]

    def play(self, step: str) -> str:
        word, *arguments = shlex.split(step)
        said = getattr(self, word)(*arguments)
        known = ", the outcome is known" if self.attempts.outcome_is_known else ""
        counts = f"{self.attempts.restarts_so_far} restarts, next is attempt {self.attempts.next_number}{known}"
        return "\n".join([step, *(f"    {line}" for line in (*said, counts))])


def test_what_nodes_report_becomes_one_result_of_each_attempt() -> None:
    """A story is a sentence, and steps."""
    golden.check_pages("attempts", lambda story: "\n".join(map(Launcher().play, story.partition(": ")[2].split(", "))))
