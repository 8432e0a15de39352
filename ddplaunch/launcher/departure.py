"""A node that must not, or should not, be used again after an attempt leaves the run.

Runs in the launcher, in the main thread. Only for the nodes of a launcher that assigns their rendezvous: elsewhere the
coordinator dismisses them. It also decides here whether the run ends because too few nodes are left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.errors import HARDWARE, LaunchError, Level
from ddplaunch.rounds.restart_policy import reason_to_leave, too_few_nodes
from ddplaunch.text import quote

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.launcher.nodes import Node, Nodes
    from ddplaunch.launcher.rendezvous_manager import RendezvousManager
    from ddplaunch.protocol.results import AttemptResult

_MAX_REASON = 1000
"""Characters shown of a reason, which may come from a script."""


def leave(node: Node, result: AttemptResult, nodes: Nodes, show: Callable[[str, int], None]) -> None:
    """Replace ``node`` if it must not be used again, or should not and is not needed, and another attempt follows.

    To be called when ``result`` is counted: if the node serves the rendezvous, another one begins with the number of
    restarts.

    Raises:
        LaunchError: too few hosts can be used. The coordinator did not know it, or the node has not heard its verdict.
    """
    if not result.attempt_follows or node.index not in nodes.participants or not nodes.rendezvous:
        return
    if leaves := reason_to_leave(result.exits):
        if too_few := too_few_nodes(*nodes.remaining_without(node), leaves):
            raise LaunchError(quote(too_few, _MAX_REASON), "", HARDWARE)
        show(quote(leaves, _MAX_REASON), Level.ALWAYS)
        nodes.retire(node)
    elif node.index in nodes.rendezvous.departing:
        _depart(node, nodes.rendezvous, nodes, show)


def on_suspend(nodes: Nodes) -> None:
    """This process is about to be suspended: no attempt may wait for its decision about nodes that depart.

    The scheduler's next answer names them again.
    """
    if nodes.rendezvous and nodes.rendezvous.departing:
        nodes.rendezvous.set_departing({}, nodes.participants, nodes.send_to)


def _depart(node: Node, rendezvous: RendezvousManager, nodes: Nodes, show: Callable[[str, int], None]) -> None:
    """Replace ``node``, which its scheduler takes out of service, unless it is needed. The coordinator waits for it."""
    remaining, needed = nodes.remaining_without(node)
    if remaining >= needed:
        show(f"{node.host} is left: {quote(rendezvous.departing[node.index], _MAX_REASON)}", Level.NORMAL)
        nodes.retire(node)
        return
    others = {index: why for index, why in rendezvous.departing.items() if index != node.index}
    rendezvous.set_departing(others, nodes.participants, nodes.send_to)
