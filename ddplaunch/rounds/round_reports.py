"""Reports of the nodes on the current round, and the verdict that follows from them.

Runs in the coordinator's process. Pure.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import first_failure
from ddplaunch.protocol.rendezvous import RoundVerdict, WorkersEnded

if TYPE_CHECKING:
    from ddplaunch.protocol.results import WorkerExit


@dataclass
class RoundReports:
    """Everything that the nodes have reported on one round so far.

    Attributes:
        reason: why the round ended, if no worker's failure ended it.
        node_lost: a node was lost.
        node_joined: a node has joined, and the next round includes it.
        stopping_nodes: nodes that stop by themselves (NodeStops), in the order of arrival.
        ended_nodes: records of the nodes that have ended, in the order of arrival.
        stop_reason: why a user or another process stopped a node, for the first such node; empty if none was stopped.
    """

    reason: str = ""
    node_lost: bool = False
    node_joined: bool = False
    stopping_nodes: list[int] = field(default_factory=list)
    ended_nodes: list[WorkersEnded] = field(default_factory=list)
    stop_reason: str = ""

    @property
    def leaves(self) -> str:
        """Why a node that has failed must not be used again; empty if there is none."""
        return next((node.leaves for node in self.ended_nodes if node.failed and node.leaves), "")

    def verdict(self, attempt: int, *, restart_allowed: bool, may_shrink: bool) -> RoundVerdict:
        """The verdict on round ``attempt``.

        Args:
            attempt: number of the round.
            restart_allowed: fewer than ``max_restarts`` restarts have happened.
            may_shrink: the run continues after the loss of a node.
        """
        if unkillable := next((node for node in self.ended_nodes if node.has_unkillable), None):
            reason = self.reason or unkillable.reason
            return RoundVerdict(attempt, attempt_follows=False, failed=True, reason=reason, cause=self._cause())
        leaves = "" if self.stop_reason else self.leaves
        # Where nodes are stopped for another reason, a worker may fail because its peers are stopped before it.
        is_explainable = bool(self.node_lost or self.node_joined or self.stop_reason or leaves)
        # If the hardware of a node is the cause, all other failures are probably its consequences.
        is_explained = bool(leaves and (cause := self._cause()) and cause.hardware)
        failed = [
            node for node in self.ended_nodes if node.failed and not is_explained and not (leaves and node.leaves)
        ]
        if any(not (is_explainable and _is_consequence(node)) for node in failed):
            attempt_follows = restart_allowed and not self.stop_reason
            cause = self._cause()
            return RoundVerdict(attempt, attempt_follows=attempt_follows, failed=True, reason=self.reason, cause=cause)
        if self.stop_reason:
            reason = self.reason or self.stop_reason
            return RoundVerdict(attempt, attempt_follows=False, failed=False, stopped=True, reason=reason)
        changed = self.node_lost or self.node_joined or bool(leaves)
        attempt_follows = changed and (may_shrink or not self.node_lost)
        return RoundVerdict(
            attempt,
            attempt_follows=attempt_follows,
            failed=changed and not attempt_follows,
            reason=self.reason or leaves,
            cause=self._cause() if leaves else None,
            leaves=leaves,
        )

    def _cause(self) -> WorkerExit | None:
        """The first failure, by the order of the nodes' NodeStops: clocks of different hosts are never compared."""
        order = {index: position for position, index in reversed(list(enumerate(self.stopping_nodes)))}
        nodes = sorted(self.ended_nodes, key=lambda node: order.get(node.node_index, len(order)))
        causes = [node.cause for node in nodes if node.cause]
        return min(causes, key=first_failure.unlikeliness, default=None)


def _is_consequence(node: WorkersEnded) -> bool:
    """Whether the node's workers failed only because they lost their connections to another node's workers."""
    return node.cause is not None and first_failure.is_consequence(node.cause)
