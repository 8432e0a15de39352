"""Reports of the nodes on the current round: what has happened, of which ``verdict`` says what follows. Pure."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import first_failure
from ddplaunch.protocol.rendezvous import WorkersEnded

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
    def leaving(self) -> set[int]:
        """The nodes that say that no further attempt may use them."""
        return {node.node_index for node in self.ended_nodes if node.node_leaves}

    @property
    def reason_to_leave(self) -> str:
        """Why the first of them must not be used again; empty if there is none."""
        return next((node.node_leaves for node in self.ended_nodes if node.node_leaves), "")

    @property
    def has_changed(self) -> bool:
        """Whether the nodes of the next round are others: one is lost, has joined, or has failed and leaves."""
        return self.node_lost or self.node_joined or self._failed_to_leave

    @property
    def _failed_to_leave(self) -> bool:
        has_failed = any(node.outcome == "failed" and node.node_leaves for node in self.ended_nodes)
        return has_failed and not self.stop_reason

    @property
    def has_failed(self) -> bool:
        """Whether a node has failed by itself: not for the loss of its peers, nor for the hardware of one that leaves.

        Where nodes are stopped for another reason, a worker may fail because its peers are stopped before it. If the
        hardware of a node is the cause, all other failures are probably its consequences.
        """
        cause, leaves = self.cause, self._failed_to_leave
        if leaves and cause and cause.hardware:
            return False
        failed = [node for node in self.ended_nodes if node.outcome == "failed" and not (leaves and node.node_leaves)]
        are_excused = self.has_changed or bool(self.stop_reason)
        return any(not (are_excused and node.cause and first_failure.is_consequence(node.cause)) for node in failed)

    @property
    def cause(self) -> WorkerExit | None:
        """The first failure, by the order of the nodes' NodeStops: clocks of different hosts are never compared."""
        order = {index: position for position, index in reversed(list(enumerate(self.stopping_nodes)))}
        nodes = sorted(self.ended_nodes, key=lambda node: order.get(node.node_index, len(order)))
        causes = [node.cause for node in nodes if node.cause]
        return min(causes, key=first_failure.unlikeliness, default=None)

    @property
    def reason_told(self) -> str:
        """Why the round ended, if no worker's failure ended it; empty if that is not known."""
        return self.reason or next((node.reason for node in self.ended_nodes if node.reason), "")
