"""One node's result of a round: what it reports to the coordinator, and what the verdict makes of it. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.protocol import first_failure
from ddplaunch.protocol.rendezvous import WorkersEnded
from ddplaunch.protocol.results import AttemptResult
from ddplaunch.rounds.restart_policy import reason_to_leave

if TYPE_CHECKING:
    from ddplaunch.protocol.results import RoundVerdict


def report(result: AttemptResult, node_index: int, *, is_stopping: bool, has_unkillable: bool) -> WorkersEnded:
    """What the coordinator must know of ``result``; ``is_stopping``: somebody stops this node."""
    return WorkersEnded(
        result.attempt,
        result.outcome,
        reason=result.reason,
        cause=first_failure.first_failure(result.exits),
        hung=result.hung,
        node_leaves=reason_to_leave(result.exits),
        node_index=node_index,
        stopped=is_stopping,
        has_unkillable=has_unkillable,
    )


def with_verdict(result: AttemptResult, verdict: RoundVerdict, *, is_stopping: bool) -> AttemptResult:
    """``result`` with the verdict on the round of all nodes."""
    was_stopped = result.outcome == "stopped" and (is_stopping or verdict.attempt_follows)
    return replace(
        result,
        outcome=result.outcome if was_stopped else verdict.outcome,
        reason=result.reason or verdict.reason,
        cause=verdict.cause,
        hung=result.hung or verdict.hung,
        node_leaves=verdict.node_leaves,
        attempt_follows=verdict.attempt_follows,
        restart_follows=verdict.restart_follows,
        decision=verdict.decision,
    )


def of_spare(verdict: RoundVerdict) -> AttemptResult:
    """The result of a node that has never taken part."""
    return with_verdict(AttemptResult(verdict.attempt, verdict.outcome, (), 0.0), verdict, is_stopping=False)


def without_verdict(result: AttemptResult, lost_reason: str, *, goes_on: bool) -> AttemptResult:
    """``result`` of a round whose rendezvous is lost; ``goes_on``: the launcher assigns another one."""
    if goes_on:
        decision = "the job goes on with another rendezvous"
        return replace(result, outcome="stopped", reason=lost_reason, attempt_follows=True, decision=decision)
    decision = "not restarted: the rendezvous is lost"
    return replace(result, outcome="failed", reason=lost_reason, lost_rendezvous=True, decision=decision)
