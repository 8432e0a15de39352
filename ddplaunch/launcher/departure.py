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
    from collections.abc import Callable, Mapping

    from ddplaunch.launcher.nodes import Node
    from ddplaunch.launcher.participants import Participants
    from ddplaunch.protocol.results import AttemptResult

_MAX_REASON = 1000
"""Characters shown of a reason, which may come from a script."""


def leave(node: Node, result: AttemptResult, participants: Participants, show: Callable[[str, int], None]) -> None:
    """Replace ``node`` if it must not be used again, or should not and is not needed, and another attempt follows.

    To be called when ``result`` is counted: if the node serves the rendezvous, another one begins with the number of
    restarts.

    Raises:
        LaunchError: too few hosts can be used. The coordinator did not know it, or the node has not heard its verdict.
    """
    if not result.attempt_follows or node.index not in participants.indices or not participants.rendezvous:
        return
    if leaves := reason_to_leave(result.exits):
        if too_few := too_few_nodes(*participants.remaining_without(node), leaves):
            raise LaunchError(quote(too_few, _MAX_REASON), "", HARDWARE)
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
