"""What follows a round: a restart, an attempt with other nodes, or the end of the run; always with the reason.

The one place that decides it, for a single node and for many. Pure, but for the count of restarts that it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.protocol.results import RoundVerdict
from ddplaunch.rounds.restart_policy import reason_not_to_restart

if TYPE_CHECKING:
    from ddplaunch.protocol.results import Outcome
    from ddplaunch.rounds.restart_policy import Restarts
    from ddplaunch.rounds.round_reports import RoundReports

GOES_ON = "the job goes on with other nodes"
_SUCCEEDED = "all workers have succeeded"
STOPPED = "not restarted: the run was stopped"
_PROCESSES_LEFT = "not restarted: processes of the attempt cannot be killed"


def verdict(attempt: int, reports: RoundReports, restarts: Restarts, too_few: str) -> RoundVerdict:
    """The verdict on round ``attempt``, all of whose nodes have reported. Counts the restart, if one follows.

    ``too_few``: why the nodes that are left form no further round, as ``restart_policy.too_few_nodes``; empty if they
    can.
    """
    cause, has_failed = reports.cause, reports.has_failed
    # A lost node may be the cause of what then looks alike in several rounds.
    restarts.note(cause if cause and (cause.give_up or not reports.node_lost) else None)
    outcome, end = _end(reports, restarts, too_few)
    is_change = not end and not has_failed
    restarts.count += not end and has_failed
    return RoundVerdict(
        attempt,
        outcome,
        reason=reports.reason_told or (reports.stop_reason if outcome == "stopped" else ""),
        cause=cause if outcome == "failed" and (has_failed or reports.leaving) else None,
        hung=any(node.hung for node in reports.ended_nodes),
        node_leaves=reports.reason_to_leave if is_change or (end and end == too_few) else "",
        attempt_follows=not end,
        restart_follows=not end and has_failed,
        decision=end or (GOES_ON if is_change else f"restart {restarts.count} of {restarts.limit}"),
    )


def _end(reports: RoundReports, restarts: Restarts, too_few: str) -> tuple[Outcome, str]:
    """The outcome of the round, and why the run ends with it; empty if another attempt follows."""
    if any(node.has_unkillable for node in reports.ended_nodes):
        return "failed", _PROCESSES_LEFT
    if reports.has_failed:
        return "failed", STOPPED if reports.stop_reason else restarts.why_none or too_few
    if reports.stop_reason:
        return "stopped", STOPPED
    if reports.has_changed:
        end = reason_not_to_restart(restarts.causes) or too_few
        return "failed" if end or reports.leaving else "stopped", end
    return "succeeded", _SUCCEEDED
