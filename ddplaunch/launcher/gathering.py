"""The nodes of a run as they come: who is still connected to, and how many workers they will all run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.host_ranges import fold
from ddplaunch.printable import shown

if TYPE_CHECKING:
    from ddplaunch.launcher.injector import Injector
    from ddplaunch.launcher.nodes import Nodes
    from ddplaunch.launcher.telling import Telling


class Gathering:
    """What is told until all nodes are there. Main thread only."""

    def __init__(self, nodes: Nodes, telling: Telling, injector: Injector) -> None:
        self._nodes = nodes
        self._telling = telling
        self._injector = injector
        self._ready: dict[int, int] = {}
        self._is_told = False
        self._is_connecting = False

    def act(self) -> float:
        """Tell who is waited for, if that takes long. Returns when to look again (``time.monotonic()``)."""
        if self._nodes.are_connecting:
            self._is_connecting = True
            return self._telling.progress.show(self._account)
        if self._is_connecting:
            self._is_connecting = False
            self._telling.progress.end()
        return float("inf")

    def _account(self) -> str:
        nodes = [self._nodes.all[index] for index in self._nodes.seats]
        missing = [node.host for node in nodes if node.state == "connecting"]
        count = f"{len(nodes) - len(missing)} of {len(nodes)} nodes"
        return f"connecting: {count}, waiting for {shown(fold(missing), 200)}"

    def ready(self, index: int, local_world_size: int) -> None:
        """A node's agent knows how many workers it will run. Told once: nodes that come later replace lost ones."""
        self._ready[index] = local_world_size
        seats = self._nodes.seats
        if not self._is_told and len(self._ready) >= len(seats) and self._ready.keys() >= set(seats):
            self._is_told = True
            self._telling.nodes_ready({self._nodes.all[seat].host: self._ready[seat] for seat in seats})
            self._injector.check(tuple(self._ready[seat] for seat in seats))
