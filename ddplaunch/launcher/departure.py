"""A node that must not, or should not, be used again after an attempt: it leaves the run, or the run ends.

Runs in the launcher, in the main thread. Only for the nodes of a launcher that assigns their rendezvous: elsewhere the
agent of a single node decides (``agent/rendezvous/single_node.py``), or the coordinator
(``rounds/coordinator.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.rounds.restart_policy import reason_to_leave, too_few_nodes
from ddplaunch.text import quote

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.launcher.nodes import Node, Nodes
    from ddplaunch.launcher.rendezvous_manager import RendezvousManager
    from ddplaunch.launcher.shutdown import Shutdown
    from ddplaunch.protocol.results import AttemptResult

_MAX_REASON = 1000
"""Characters shown of a reason, which may come from a script."""


def decided(node: Node, result: AttemptResult, nodes: Nodes) -> AttemptResult:
    """``result``; without a further attempt if ``node`` must not be used again and too few nodes are left.

    To be called before ``result`` is counted; ``leave`` follows.
    """
    leaves = _must_leave(node, result, nodes)
    if leaves and (why_end := too_few_nodes(*nodes.remaining_without(node), leaves)):
        end = replace(result, attempt_follows=False, restart_follows=False)
        return replace(end, decision=why_end, node_leaves=leaves)
    return result


def leave(
    node: Node, result: AttemptResult, nodes: Nodes, shutdown: Shutdown, show: Callable[[str, int], None]
) -> None:
    """Replace ``node`` if it must not be used again, or should not and is not needed; or shut the run down.

    To be called when ``result``, of which ``decided`` has been asked, is counted: if the node serves the rendezvous,
    another one begins with the number of restarts.

    Raises:
        LaunchError: too few hosts can be used.
    """
    if node.index not in nodes.participants or not nodes.rendezvous:
        return
    if not result.attempt_follows:
        if result.node_leaves:
            shutdown.on_node_ended()
    elif leaves := _must_leave(node, result, nodes):
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


def _must_leave(node: Node, result: AttemptResult, nodes: Nodes) -> str:
    """Why no further attempt may use ``node``; empty if one may, or if this launcher does not decide about it."""
    is_ours = result.attempt_follows and nodes.rendezvous and node.index in nodes.participants
    return reason_to_leave(result.exits) if is_ours else ""


def _depart(node: Node, rendezvous: RendezvousManager, nodes: Nodes, show: Callable[[str, int], None]) -> None:
    """Replace ``node``, which its scheduler takes out of service, unless it is needed. The coordinator waits for it."""
    remaining, needed = nodes.remaining_without(node)
    if remaining >= needed:
        show(f"{node.host} is left: {quote(rendezvous.departing[node.index], _MAX_REASON)}", Level.NORMAL)
        nodes.retire(node)
        return
    others = {index: why for index, why in rendezvous.departing.items() if index != node.index}
    rendezvous.set_departing(others, nodes.participants, nodes.send_to)
