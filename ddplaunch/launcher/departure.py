"""A node that must not, or should not, be used again after an attempt: it leaves the run, or the run ends.

Runs in the launcher, in the main thread. Only for the nodes of a launcher that assigns their rendezvous: elsewhere the
agent of a single node decides (``agent/rendezvous.py``), or the coordinator (``rendezvous/coordinator.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.protocol.restart_policy import reason_to_end, reason_to_leave
from ddplaunch.text import quote

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.launcher.nodes import Node, Nodes
    from ddplaunch.launcher.shutdown import Shutdown
    from ddplaunch.protocol.results import AttemptResult

_MAX_REASON = 1000
"""Characters shown of a reason, which may come from a script."""


def after_attempt(
    node: Node, result: AttemptResult, nodes: Nodes, shutdown: Shutdown, show: Callable[[str, int], None]
) -> AttemptResult:
    """Replace ``node`` if its workers' exits in ``result`` demand it.

    Returns ``result``; if too few nodes are left, without a further attempt: then the run is shut down.

    Raises:
        LaunchError: too few hosts can be used.
    """
    leaves = reason_to_leave(result.exits) if result.attempt_follows and nodes.rendezvous else ""
    if not leaves or node.index not in nodes.participants:
        return result
    if why_end := reason_to_end(leaves, *nodes.remaining_without(node)):
        shutdown.on_node_ended()
        return replace(result, attempt_follows=False, reason=why_end, node_leaves=leaves)
    show(quote(leaves, _MAX_REASON), Level.ALWAYS)
    nodes.retire(node)
    return result


def depart(node: Node, result: AttemptResult, nodes: Nodes, show: Callable[[str, int], None]) -> None:
    """Replace ``node`` if its scheduler takes it out of service and it is not needed. The coordinator waits for that.

    To be called when ``result`` is counted: another rendezvous begins with the number of restarts.

    Raises:
        LaunchError: too few hosts can be used.
    """
    rendezvous = nodes.rendezvous
    reason = rendezvous.departing.get(node.index) if rendezvous and result.attempt_follows else None
    if rendezvous is None or reason is None or node.index not in nodes.participants:
        return
    remaining, needed = nodes.remaining_without(node)
    if remaining >= needed:
        show(f"{node.host} is left: {quote(reason, _MAX_REASON)}", Level.NORMAL)
        nodes.retire(node)
        return
    others = {index: why for index, why in rendezvous.departing.items() if index != node.index}
    rendezvous.set_departing(others, nodes.participants, nodes.send_to)
