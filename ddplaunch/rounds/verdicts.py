"""What the coordinator's verdict on a round makes of this node's result. Used by the agent. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.protocol.results import AttemptResult

if TYPE_CHECKING:
    from ddplaunch.protocol.rendezvous import RoundVerdict
    from ddplaunch.protocol.results import Outcome


def with_verdict(result: AttemptResult, verdict: RoundVerdict, *, is_stopping: bool) -> AttemptResult:
    """``result`` with the verdict of all nodes; ``is_stopping``: somebody stops this node."""
    was_stopped = result.outcome == "stopped" and (is_stopping or verdict.attempt_follows)
    # If a node leaves, the round has not failed as a whole: no restart is counted.
    own_counts = was_stopped or bool(verdict.leaves and verdict.attempt_follows)
    return replace(
        result,
        outcome=result.outcome if own_counts else outcome(verdict),
        attempt_follows=verdict.attempt_follows,
        reason=result.reason or verdict.reason,
        cause=verdict.cause,
        node_leaves=verdict.leaves,
        hung=result.hung or verdict.hung,
    )


def result_of_spare(verdict: RoundVerdict) -> AttemptResult:
    """The result of a node that has never taken part."""
    return AttemptResult(verdict.attempt, outcome(verdict), (), 0.0, reason=verdict.reason, cause=verdict.cause)


def outcome(verdict: RoundVerdict) -> Outcome:
    """The outcome of the round as a whole."""
    return "stopped" if verdict.stopped else "failed" if verdict.failed else "succeeded"


def without_verdict(result: AttemptResult, lost_reason: str, *, goes_on: bool) -> AttemptResult:
    """``result`` of a round whose rendezvous is lost; ``goes_on``: the launcher assigns another one."""
    if goes_on:
        return replace(result, outcome="stopped", attempt_follows=True, reason=lost_reason)
    return replace(result, outcome="failed", reason=lost_reason, lost_rendezvous=True)
