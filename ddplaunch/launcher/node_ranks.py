"""The ranks of each node: what a node says about its workers must be about them, and not about those of other nodes.

Runs in the launcher, in the main thread. A node's own AttemptStarted says which ranks it has; what that may say follows
from how many workers the nodes have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted
from ddplaunch.protocol.sender import OfRanks
from ddplaunch.protocol.wire import ProtocolError
from ddplaunch.text import ranks

if TYPE_CHECKING:
    from collections.abc import Collection

    from ddplaunch.launcher.nodes import Node
    from ddplaunch.launcher.participants import Participants


class NodeRanks:
    """Those of one run."""

    def __init__(self, participants: Participants) -> None:
        self._participants = participants
        self._of_node: dict[int, tuple[int, range]] = {}

    def check(self, node: Node, event: object) -> None:
        """Follow the attempts of ``node``.

        Raises:
            ProtocolError: the event is a record that names ranks of other nodes.
        """
        match event:
            case AttemptStarted():
                self._check_started(node, event)
                own = range(event.first_rank, event.first_rank + len(event.pids))
                self._of_node[node.index] = event.attempt, own
            case AttemptEnded(result=result, evidence=evidence):
                self._check(node, result.attempt, [*(exit_.rank for exit_ in result.exits)])
                for each in evidence:
                    self.check(node, each)
            case OfRanks(attempt=attempt, named_ranks=named):
                self._check(node, attempt, named)

    def _check_started(self, node: Node, event: AttemptStarted) -> None:
        """Where each node has a launcher, this launcher does not know how many workers the other nodes have.

        Nor does it while the AgentReady of a node is on its way: the nodes may have met over a faster link.
        """
        workers, participants = len(event.pids), self._participants
        fits = workers <= node.workers and event.first_rank + workers <= event.world_size
        if participants.rendezvous:
            nodes = participants.nodes.all
            is_known = all(nodes[index].workers for index in participants.indices)
            fits = fits and (not is_known or event.world_size <= sum(each.workers for each in nodes))
        if not fits or event.node_rank >= event.nnodes:
            raise ProtocolError(f"{workers} of {event.world_size} workers from rank {event.first_rank} on do not fit")

    def _check(self, node: Node, attempt: int, named: Collection[int]) -> None:
        """An attempt that failed before all workers ran was not started: only the number of its ranks is known."""
        known, own = self._of_node.get(node.index, (-1, range(0)))
        is_own = own.start <= min(named, default=own.start) and max(named, default=-1) < own.stop
        is_own = is_own if known == attempt else max(named, default=0) - min(named, default=0) < max(node.workers, 1)
        if not is_own or (isinstance(named, list) and len(set(named)) < len(named)):
            raise ProtocolError(f"{ranks(set(named))} are not its own")
