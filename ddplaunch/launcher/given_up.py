"""Gives up a node whose records this launcher cannot handle: one bad node must not end the run of the others.

Runs in the launcher, in the main thread. The transport gives up a node whose records cannot be decoded; here are those
that contradict each other, and those in which an unexpected error of the launcher has its cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.errors import INTERNAL, LaunchError, Level
from ddplaunch.launcher.node_ranks import NodeRanks
from ddplaunch.protocol.launcher_agent import ReportOfNode
from ddplaunch.protocol.wire import ProtocolError
from ddplaunch.text import quote
from ddplaunch.transport.handle import ChannelClosed

if TYPE_CHECKING:
    from collections.abc import Callable

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
        self._is_local, self._shutdown = config.transport == "local", shutdown
        self._lost_nodes, self._handle, self._show = lost_nodes, handle, show
        self._ranks = NodeRanks(participants)
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
