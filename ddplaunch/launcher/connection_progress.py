"""The start of the nodes, for the user: which are not connected yet, and when all agents are ready.

Runs in the launcher, in the main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.cluster.hostlist import fold
from ddplaunch.launcher.nodes import NodeState
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.launcher.display.progress import Progress
    from ddplaunch.launcher.participants import Participants


class ConnectionProgress:
    """Shows which nodes are not connected yet, and detects when all agents are ready."""

    def __init__(self, participants: Participants, progress: Progress) -> None:
        self._nodes, self._participants = participants.nodes, participants
        self._progress = progress
        self._is_connecting = False
        self._local_world_sizes: dict[int, int] = {}
        self._were_all_ready = False

    def run_due(self, _now: float) -> float:
        """Show the missing nodes if connecting takes long. Returns when to call again."""
        if self._nodes.any_connecting:
            self._is_connecting = True
            return self._progress.show(self._describe)
        if self._is_connecting:
            self._is_connecting = False
            self._progress.end()
        return float("inf")

    def _describe(self) -> str:
        nodes = [self._nodes.all[index] for index in self._participants.indices]
        missing = [node.host for node in nodes if node.state is NodeState.CONNECTING]
        count = f"{len(nodes) - len(missing)} of {len(nodes)} nodes"
        return f"connecting: {count}, waiting for {quote(fold(missing), 200)}"

    def on_agent_ready(self, index: int, local_world_size: int) -> dict[str, int] | None:
        """Count a node whose agent is ready, with its number of workers.

        Returns the workers per host when all participants are ready for the first time; otherwise None.
        """
        self._local_world_sizes[index] = local_world_size
        participants, sizes = self._participants.indices, self._local_world_sizes
        if self._were_all_ready or len(sizes) < len(participants) or not sizes.keys() >= set(participants):
            return None
        self._were_all_ready = True
        return {self._nodes.all[index].host: sizes[index] for index in participants}
