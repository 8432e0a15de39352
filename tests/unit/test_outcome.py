"""One outcome and one exit code, from what the nodes and the user have said."""

from __future__ import annotations

import signal
from dataclasses import replace

from ddplaunch.launcher import outcome
from ddplaunch.protocol.results import AttemptResult, WorkerError, WorkerExit
from tests.support import golden

PEER_GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:53403"


def test_a_run_has_one_outcome_and_one_exit_code() -> None:
    """A question is what rank 1 has raised, signals, and fields of its exit and of the attempt."""

    def told(question: str) -> str:
        given = golden.keywords(question)
        message = given.pop("raised", "ValueError: no").replace("peer gone", PEER_GONE)
        exit_ = WorkerExit(1, 0, "node1", 1, 1, stopped=False, time_s=0.0, duration_s=1.0)
        exit_ = replace(exit_, error=WorkerError(message, "", 0.0), **given.pop("exit", {}))
        signals = tuple(getattr(signal, name) for name in given.pop("signals", ()))
        left, is_late, continues = given.pop("left", ()), given.pop("late", False), given.pop("continues", False)
        attempt = AttemptResult(0, given.pop("outcome", "failed"), (exit_,), 1.0, cause=exit_)
        result = outcome.result(
            run_id="run", attempts=[replace(attempt, **given)], error=None, signals=signals, signals_came_late=is_late,
            continues=continues, unkillable_pids=left, unreachable_hosts=(), duration_s=1.0, run_dir=None,
        )  # fmt: skip
        assert result.unkillable_pids == left
        first = result.first_failure
        return f"{result.outcome}, {result.exit_code}, first: {first and first.rank}"

    golden.check_answers("outcomes", told)
