"""Gives up a node whose records this launcher cannot handle: one bad node must not end the run of the others.

Runs in the launcher, in the main thread. The transport gives up a node whose records cannot be decoded; here are those
that contradict each other or what the user wants, and those in which an unexpected error of the launcher has its cause.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ddplaunch.errors import INTERNAL, LaunchError, Level
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted, OfRanks, ReportOfNode
from ddplaunch.protocol.wire import ProtocolError
from ddplaunch.text import quote, ranks
from ddplaunch.transport.handle import ChannelClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ddplaunch.config import LaunchConfig
    from ddplaunch.launcher.lost_nodes import LostNodes
    from ddplaunch.launcher.nodes import Node
    from ddplaunch.launcher.participants import Participants
    from ddplaunch.launcher.shutdown import Shutdown

_MAX_REASON = 300
_HINT = "This is a bug in ddplaunch, or the node is not sound; please report it with the output of -v."
_BUG_HINT = "Please report it with the lines above and the output of `ddplaunch --version`."


class GivenUp:
    """The nodes of one run, as far as they were given up."""

    def __init__(
        self,
        config: LaunchConfig,
        participants: Participants,
        shutdown: Shutdown,
        lost_nodes: LostNodes,
        handle: Callable[[Node, object], None],
        show: Callable[[str, int], None],
    ) -> None:
        """``handle`` handles an event of a node."""
        self._is_local, self._shutdown = config.is_local, shutdown
        self._lost_nodes, self._handle, self._show = lost_nodes, handle, show
        self._ranks = NodeRanks(participants)
        # Where each node has a launcher, the one of the node that serves the rendezvous says how many there may be.
        self._max_restarts = None if config.each_node_has_launcher else config.max_restarts
        self._restarts: Counter[int] = Counter()
        self._indices: set[int] = set()

    def handle(self, node: Node, event: object) -> None:
        """Handle an event of ``node``; if that fails, the node is lost, and its later records are ignored.

        Agents on this machine are part of this program: there, an unexpected error is a bug, with which the run ends in
        order and with its report. A report of another node that such an agent passes on is only ignored.

        Raises:
            LaunchError: the run cannot go on.
        """
        if node.index in self._indices and not isinstance(event, ChannelClosed):
            return
        try:
            self._ranks.check(node, event)
            if not (isinstance(event, AttemptEnded) and self._restarts_too_often(node, event)):
                self._handle(node, event)
        except LaunchError:
            raise
        except Exception as error:
            if isinstance(event, ReportOfNode):
                self._show(f"a report of node {event.node_index} is ignored: {_told(event, error)}", Level.VERBOSE)
            elif self._is_local:
                self._end_run(node, event, error)
            else:
                self._give_up(node, event, error)

    def _restarts_too_often(self, node: Node, event: AttemptEnded) -> bool:
        """Whether the agent restarts its workers more often than it may; then it is given up."""
        self._restarts[node.index] += event.result.restart_follows
        if self._max_restarts is None or self._restarts[node.index] <= self._max_restarts:
            return False
        reason = f"the agent on {node.host} reports more than {self._max_restarts} restarts"
        self._lost_nodes.give_up(node, reason)
        return True

    def _give_up(self, node: Node, event: object, error: Exception) -> None:
        self._indices.add(node.index)
        hint = "" if isinstance(error, ProtocolError) else _HINT
        self._lost_nodes.give_up(node, f"the agent on {node.host} was given up: {_told(event, error)}", hint)

    def _end_run(self, node: Node, event: object, error: Exception) -> None:
        import traceback

        said = f"a bug in ddplaunch: on {node.host}: {_told(event, error)}\n{traceback.format_exc()}"
        self._shutdown.fail(LaunchError(said, _BUG_HINT, INTERNAL))
        if isinstance(event, ChannelClosed):
            self._lost_nodes.on_lost(node, f"the agent on {node.host} has ended")
        elif not self._shutdown.node_ended:
            self._shutdown.on_node_ended()


def _told(event: object, error: Exception) -> str:
    """One line: which record, and what is wrong with it."""
    record = type(event).__name__
    if isinstance(error, ProtocolError):
        return f"its {record} is invalid: {quote(str(error), _MAX_REASON)}"
    return f"its {record} cannot be handled: {type(error).__name__}: {quote(str(error), _MAX_REASON)}"


class NodeRanks:
    """The ranks of each node of a run: what a node says about workers must be about its own.

    A node's own AttemptStarted says which ranks it has; what that may say follows from how many workers the nodes have.
    """

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
        if participants.assigns_rendezvous:
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
