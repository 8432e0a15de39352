"""Whether the job hangs: no worker on any node has written anything for too long. Main thread only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.hang import EndHung, WorkersAre

if TYPE_CHECKING:
    from ddplaunch.launcher.handles import Node
    from ddplaunch.launcher.nodes import Nodes


class Hangs:
    """Has the agents end an attempt in which all nodes are silent."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._told: dict[int, WorkersAre] = {}

    def hear(self, node: Node, event: WorkersAre) -> None:
        """What the workers of a node do; some nodes may have done their part."""
        self._told[node.index] = event
        told = [self._told.get(index) for index in self._nodes.seats]
        states = {each.state if each and each.attempt == event.attempt else "heard" for each in told}
        if "silent" in states and "heard" not in states:
            self._nodes.send(EndHung(event.attempt))
