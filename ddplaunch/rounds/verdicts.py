"""What follows a round: a restart, an attempt with other nodes, or the end of the run; always with the reason.

The one place that decides it, and that says it, for a single node and for many: what the nodes report, whether a
restart is left and can help (``restarts``, which keeps what was counted so far), the verdict, and the result of each
node. All but that is pure. ``Coordinator`` calls it. docs/architecture.md ("Where does --max-restarts act?") has a
table of the three ways to start: which process runs the coordinator, and whose ``--max-restarts`` counts.

The agents of all nodes get the verdict, and report it to their launcher (``AttemptEnded``). A launcher that leads all
nodes may end the part of a node, or the run, by an order to stop: ``LostNodes`` after a loss,
``Participants.leave_if_due`` after a verdict, and ``Shutdown``. ``RecordChecks`` counts a node as lost that reports
more restarts than the user allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.protocol import first_failure
from ddplaunch.protocol.rendezvous import WorkersEnded
from ddplaunch.protocol.results import NO_RESTARTS_ALLOWED, AttemptResult, RoundVerdict, WorkerExit
from ddplaunch.rounds.restarts import Restarts, why_restart_cannot_help
from ddplaunch.text import plural

if TYPE_CHECKING:
    from ddplaunch.protocol.results import Outcome

_GOES_ON = "the job goes on with other nodes"
_MOVES = "the job goes on with another rendezvous"
_SUCCEEDED = "all workers have succeeded"
_STOPPED = "not restarted: the run was stopped"
# The failure page does not show NO_RESTARTS_ALLOWED alone, but shows this.
_FAILED_TOO = f"{NO_RESTARTS_ALLOWED}, and a worker has failed, not because of the loss"
_LOST = "no further attempt: the rendezvous is lost"
_PROCESSES_LEFT = "not restarted: processes of the attempt cannot be killed"


# What the nodes report.


def workers_ended(
    result: AttemptResult, node_index: int, *, is_stopping: bool, has_unkillable: bool, saved: str | None = None
) -> WorkersEnded:
    """What the coordinator must know of a node's ``result``; ``is_stopping``: somebody stops this node."""
    return WorkersEnded(
        result.attempt,
        result.outcome,
        reason=result.reason,
        cause=first_failure.first_failure(result.exits),
        hung=result.hung,
        node_leaves=why_not_used_again(result.exits),
        node_index=node_index,
        stopped=is_stopping,
        has_unkillable=has_unkillable,
        saved=saved,
    )


class RoundReports:
    """Everything that the nodes have reported on one round so far.

    What follows (``decide``) is said by the first of these that holds:

    - processes of the attempt cannot be killed: the end;
    - ``worker_failed_by_itself``: a worker has failed, and not because its peers were lost or stopped: a restart, if
      one is left and can help;
    - ``why_node_stopped``: a node was stopped: the end;
    - ``nodes_change``: a node is lost, has left or joined, or must not be used again: an attempt with other nodes, no
      restart, if enough are left;
    - else all workers have succeeded: the end.

    Attributes:
        reason: why the round ended, if no worker's failure ended it.
        node_gone: a node is lost, or has left by itself.
        node_joined: a node has joined, and the next round includes it.
        stopping_nodes: nodes that stop by themselves (NodeStopsRound), in the order of arrival.
        ended_nodes: records of the nodes that have ended, in the order of arrival.
        why_node_stopped: why a user or another process stopped a node, for the first such node; empty if none was
            stopped.
        saved: what the job would go on from, as the node of rank 0 says it; None: it has not.
    """

    def __init__(self) -> None:
        self.saved: str | None = None
        self.reason = ""
        self.node_gone = False
        self.node_joined = False
        self.stopping_nodes: list[int] = []
        self.ended_nodes: list[WorkersEnded] = []
        self.why_node_stopped = ""

    @property
    def leaving(self) -> set[int]:
        """The nodes that say that no further attempt may use them."""
        return {node.node_index for node in self.ended_nodes if node.node_leaves}

    @property
    def why_one_leaves(self) -> str:
        """Why the first of them must not be used again; empty if there is none."""
        return next((node.node_leaves for node in self.ended_nodes if node.node_leaves), "")

    @property
    def nodes_change(self) -> bool:
        """Whether the nodes of the next round are others: one is lost, has joined, or has failed and leaves."""
        return self.node_gone or self.node_joined or self._failed_and_leaves

    @property
    def _failed_and_leaves(self) -> bool:
        has_failed = any(node.outcome == "failed" and node.node_leaves for node in self.ended_nodes)
        return has_failed and not self.why_node_stopped

    @property
    def worker_failed_by_itself(self) -> bool:
        """Whether some worker has failed by itself: no lost peer and no broken hardware of a node explains it.

        Where nodes are stopped for another reason, a worker may fail because its peers are stopped before it. If the
        hardware of a node is the cause, all other failures are probably its consequences.
        """
        cause, leaves = self.cause, self._failed_and_leaves
        if leaves and cause and cause.hardware:
            return False
        failed = [node for node in self.ended_nodes if node.outcome == "failed" and not (leaves and node.node_leaves)]
        are_excused = self.nodes_change or bool(self.why_node_stopped)
        return any(not (are_excused and node.cause and first_failure.is_consequence(node.cause)) for node in failed)

    @property
    def cause(self) -> WorkerExit | None:
        """The first failure, by the order of NodeStopsRound records: clocks of two hosts are never compared."""
        order = {index: position for position, index in reversed(list(enumerate(self.stopping_nodes)))}
        nodes = sorted(self.ended_nodes, key=lambda node: order.get(node.node_index, len(order)))
        causes = [node.cause for node in nodes if node.cause]
        return min(causes, key=first_failure.cause_order, default=None)

    @property
    def why_ended(self) -> str:
        """Why the round ended, if no worker's failure ended it; empty if that is not known."""
        return self.reason or next((node.reason for node in self.ended_nodes if node.reason), "")


# Nodes that are not used again, and nodes that are too few.


def why_not_used_again(exits: Iterable[WorkerExit]) -> str:
    """Why the node of these workers must not be used for another attempt, with its host; empty if it may be used.

    ``exits`` are the workers of one node. A fault of the hardware says more than a wish of the script.
    """
    all_exits = list(exits)
    if broken := next((exit_ for exit_ in all_exits if exit_.hardware), None):
        return f"{broken.host} is not used again: {broken.hardware}"
    if asked := next((exit_ for exit_ in all_exits if exit_.avoid_node), None):
        return f"{asked.host} is not used again: rank {asked.rank} asks for it: {asked.avoid_node}"
    return ""


def why_too_few_nodes(remaining: int, needed: int, leaving: str = "", *, ends_rendezvous: bool = False) -> str:
    """Why no attempt follows without the nodes that are lost or leave; empty if enough nodes remain.

    Args:
        remaining: number of nodes that the next attempt could have, spares included.
        needed: the smallest number that the user allows.
        leaving: ``why_not_used_again`` of a node; empty if none leaves.
        ends_rendezvous: that node serves the rendezvous, and no launcher begins another.
    """
    if remaining >= needed:
        return f"no further attempt: {leaving}, and this node serves the rendezvous" if ends_rendezvous else ""
    are_left = f"{plural(remaining, 'node')} {'is' if remaining == 1 else 'are'} left, and {needed} are needed"
    reasons = [leaving, are_left if remaining else "there is no other node"]
    return f"no further attempt: {'; '.join(filter(None, reasons))}"


# The verdict.


def decide(attempt: int, reports: RoundReports, restarts: Restarts, why_too_few: str) -> RoundVerdict:
    """The verdict on round ``attempt``, all of whose nodes have reported. Counts the restart, if one follows.

    ``why_too_few``: why the nodes that are left form no further round, as ``why_too_few_nodes``; empty if they can.
    """
    cause, by_itself = reports.cause, reports.worker_failed_by_itself
    # A lost node may be the cause of what then looks alike in several rounds; a script that gives up has its reason.
    restarts.note(cause if cause and (cause.give_up or not reports.node_gone) else None, reports.saved)
    outcome, why_end = _outcome_and_why_end(reports, restarts, why_too_few)
    is_restart = not why_end and by_itself
    is_change = not why_end and not by_itself
    are_too_few = bool(why_end) and why_end == why_too_few
    restarts.restart_count += is_restart
    return RoundVerdict(
        attempt,
        outcome,
        reason=reports.why_ended or (reports.why_node_stopped if outcome == "stopped" else ""),
        cause=cause if outcome == "failed" and (by_itself or reports.leaving) else None,
        hung=any(node.hung for node in reports.ended_nodes),
        node_leaves=reports.why_one_leaves if is_change or are_too_few else "",
        attempt_follows=not why_end,
        restart_follows=is_restart,
        saved_is_suspect=by_itself and restarts.saved_is_suspect,
        decision=why_end or (_GOES_ON if is_change else f"restart {restarts.restart_count} of {restarts.max_restarts}"),
    )


def _outcome_and_why_end(reports: RoundReports, restarts: Restarts, why_too_few: str) -> tuple[Outcome, str]:
    """The outcome of the round, and why the run ends with it; empty if another attempt follows."""
    if any(node.has_unkillable for node in reports.ended_nodes):
        return "failed", _PROCESSES_LEFT
    if reports.worker_failed_by_itself:
        why_no_restart = _STOPPED if reports.why_node_stopped else restarts.why_no_restart or why_too_few
        # The user has read that the job can go on without the lost node: say why it does not.
        return "failed", _FAILED_TOO if reports.node_gone and why_no_restart == NO_RESTARTS_ALLOWED else why_no_restart
    if reports.why_node_stopped:
        return "stopped", _STOPPED
    if reports.nodes_change:
        why_end = why_restart_cannot_help(restarts.causes, restarts.has_saved) or why_too_few
        return "failed" if why_end or reports.leaving else "stopped", why_end
    return "succeeded", _SUCCEEDED


def last_verdict(verdict: RoundVerdict, reason: str) -> RoundVerdict:
    """The last verdict of a node that leaves for ``reason``, where the others go on after ``verdict``."""
    decision = f"not restarted: {reason}; the other nodes go on"
    return RoundVerdict(verdict.attempt, "failed", cause=verdict.cause, node_leaves=reason, decision=decision)


# What it means for a node.


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
        saved_is_suspect=verdict.saved_is_suspect,
        decision=verdict.decision,
    )


def of_spare(verdict: RoundVerdict) -> AttemptResult:
    """The result of a node that had no part in the last round."""
    return with_verdict(AttemptResult(verdict.attempt, verdict.outcome, (), 0.0), verdict, is_stopping=False)


# A node that gets no verdict.


def of_node_that_left(result: AttemptResult) -> AttemptResult:
    """``result`` of a node that has lost its launcher and ends. ``attempt_follows``: the other nodes go on."""
    return replace(result, outcome="stopped", attempt_follows=True, decision=_GOES_ON)


def of_stopped_node(result: AttemptResult, why_must_stop: str | None) -> AttemptResult:
    """``result`` of a node that is stopped while it waits for the verdict."""
    return replace(result, reason=why_must_stop or result.reason, decision=_STOPPED)


def of_missing_verdict(result: AttemptResult, why_must_stop: str | None, server: str) -> AttemptResult:
    """``result`` of a node that has waited in vain for the verdict of ``server``, which serves the rendezvous."""
    decision = f"no further attempt: {server} sent no verdict"
    return replace(result, reason=why_must_stop or result.reason, decision=decision)


def of_lost_rendezvous(result: AttemptResult, reason: str, *, goes_on: bool, has_unkillable: bool) -> AttemptResult:
    """``result`` of a round whose rendezvous is lost; ``goes_on``: the launcher assigns another one.

    The attempt that then follows never counts as a restart, even if a worker had failed by itself: no node knows of the
    failures of the others. None follows if processes of this node cannot be killed: only the lost coordinator knew it.
    """
    if has_unkillable:  # They are the reason in ``result``.
        return replace(result, outcome="failed", decision=_PROCESSES_LEFT)
    if goes_on:
        return replace(result, outcome="stopped", reason=reason, attempt_follows=True, decision=_MOVES)
    return replace(result, outcome="failed", reason=reason, lost_rendezvous=True, decision=_LOST)
