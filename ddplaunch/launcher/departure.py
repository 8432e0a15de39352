"""A node that must not, or should not, be used again after an attempt: it leaves the run, or the run ends.

Runs in the launcher, in the main thread. Only for the nodes of a launcher that assigns their rendezvous: elsewhere the
agent of a single node decides (``agent/rendezvous/single_node.py``), or the coordinator
(``rendezvous/coordinator.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.protocol.restart_policy import reason_to_end, reason_to_leave
from ddplaunch.text import quote

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddplaunch.launcher.nodes import Node
    from ddplaunch.launcher.participants import Participants
    from ddplaunch.launcher.shutdown import Shutdown
    from ddplaunch.protocol.results import AttemptResult

_MAX_REASON = 1000
"""Characters shown of a reason, which may come from a script."""


def with_decision(node: Node, result: AttemptResult, participants: Participants) -> AttemptResult:
    """``result``; without a further attempt if ``node`` must not be used again and too few nodes are left.

    To be called before ``result`` is counted; ``leave`` follows.
    """
    leaves = _must_leave(node, result, participants)
    if leaves and (why_end := reason_to_end(leaves, *participants.remaining_without(node))):
        return replace(result, attempt_follows=False, reason=why_end, node_leaves=leaves)
    return result


def leave(
    node: Node, result: AttemptResult, participants: Participants, shutdown: Shutdown, show: Callable[[str, int], None]
) -> None:
    """Replace ``node`` if it must not be used again, or should not and is not needed; or shut the run down.

    To be called when ``result``, which has come from ``with_decision``, is counted: if the node serves the rendezvous,
    another one begins with the number of restarts.

    Raises:
        LaunchError: too few hosts can be used.
    """
    if node.index not in participants.indices or not participants.rendezvous:
        return
    if not result.attempt_follows:
        if result.node_leaves:
            shutdown.on_node_ended()
    elif leaves := _must_leave(node, result, participants):
        show(quote(leaves, _MAX_REASON), Level.ALWAYS)
        participants.retire(node)
    elif node.index in participants.rendezvous.departing:
        _depart(node, participants.rendezvous.departing, participants, show)


def on_suspend(participants: Participants) -> None:
    """This process is about to be suspended: no attempt may wait for its decision about nodes that depart.

    The scheduler's next answer names them again.
    """
    if participants.rendezvous and participants.rendezvous.departing:
        participants.set_departing({})


def _must_leave(node: Node, result: AttemptResult, participants: Participants) -> str:
    """Why no further attempt may use ``node``; empty if one may, or if this launcher does not decide about it."""
    is_ours = result.attempt_follows and participants.rendezvous and node.index in participants.indices
    return reason_to_leave(result.exits) if is_ours else ""


def _depart(
    node: Node, departing: Mapping[int, str], participants: Participants, show: Callable[[str, int], None]
) -> None:
    """Replace ``node``, which its scheduler takes out of service, unless it is needed. The coordinator waits for it."""
    remaining, needed = participants.remaining_without(node)
    if remaining >= needed:
        show(f"{node.host} is left: {quote(departing[node.index], _MAX_REASON)}", Level.NORMAL)
        participants.retire(node)
        return
    participants.set_departing({index: why for index, why in departing.items() if index != node.index})
