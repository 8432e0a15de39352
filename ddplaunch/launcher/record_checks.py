"""Checks what nodes say: a record must not contradict what this launcher knows of the node, or what the user wants.

Runs in the launcher, in the main thread. A node whose record fails a check is lost: ``LostNodes.on_bad_record``. One
whose record cannot be decoded is lost, too: the transport kills its agent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import MAX_SLOTS_PER_HOST
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted, OfRanks
from ddplaunch.protocol.wire import ProtocolError
from ddplaunch.text import ranks

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.launcher.nodes import Node
    from ddplaunch.launcher.participants import Participants
    from ddplaunch.protocol.results import AttemptResult


class RecordChecks:
    """The checks of one run: what a node says of workers is about its own, and not of more restarts than are allowed.

    They decide nothing about restarts: the coordinator does.

    A node's own AttemptStarted says which ranks it has; what that may say follows from how many workers the nodes have.
    """

    def __init__(self, config: LaunchConfig, participants: Participants) -> None:
        self._participants = participants
        # Where each node has a launcher, the one of the node that serves the rendezvous says how many there may be.
        self._max_restarts = None if config.each_node_has_launcher else config.max_restarts
        self._one_launcher_leads = config.one_launcher_leads
        self._of_node: dict[int, tuple[int, range]] = {}
        self._restarts: Counter[int] = Counter()
        self._known_size: tuple[int, int] | None = None
        """Attempt and number of workers that a node has told last: all nodes of thousands tell the same."""

    def check(self, node: Node, event: object) -> None:
        """Follow the attempts of ``node``.

        Raises:
            ProtocolError: the event is a record that fails a check.
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
                self._check_restarts(node, result)
            case OfRanks(attempt=attempt, named_ranks=named):
                self._check(node, attempt, named)

    def _check_restarts(self, node: Node, result: AttemptResult) -> None:
        self._restarts[node.index] += result.restart_follows
        if self._max_restarts is not None and self._restarts[node.index] > self._max_restarts:
            raise ProtocolError(f"it reports more than {self._max_restarts} restarts")

    def _check_started(self, node: Node, event: AttemptStarted) -> None:
        """Where each node has a launcher, this launcher does not know how many workers the other nodes have.

        Nor does it while the AgentReady of a node is on its way: the nodes may have met over a faster link. It never
        arrives from a node that is lost meanwhile, and the others have met with it all the same.
        """
        workers = len(event.pids)
        fits = workers <= node.workers and event.first_rank + workers <= event.world_size
        if self._one_launcher_leads and self._known_size != (event.attempt, event.world_size):
            most = sum(each.workers or MAX_SLOTS_PER_HOST for each in self._participants.nodes.all)
            fits = fits and event.world_size <= most
            self._known_size = (event.attempt, event.world_size) if fits else None
        if not fits or event.node_rank >= event.nnodes:
            raise ProtocolError(f"{workers} of {event.world_size} workers from rank {event.first_rank} on do not fit")

    def _check(self, node: Node, attempt: int, named: Collection[int]) -> None:
        """An attempt that failed before all workers ran was not started: only the number of its ranks is known."""
        known, own = self._of_node.get(node.index, (-1, range(0)))
        is_own = own.start <= min(named, default=own.start) and max(named, default=-1) < own.stop
        is_own = is_own if known == attempt else max(named, default=0) - min(named, default=0) < max(node.workers, 1)
        if not is_own or (isinstance(named, list) and len(set(named)) < len(named)):
            raise ProtocolError(f"{ranks(set(named))} are not its own")
