"""What a run waits for, for the user: the nodes that are not connected yet, and at the end the sweeps of lost nodes.

Runs in the launcher, in the main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.cluster.hostlist import fold
from ddplaunch.errors import Level
from ddplaunch.launcher.nodes import SWEEP_S, NodeState
from ddplaunch.mailbox import NEVER
from ddplaunch.text import quote

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.launcher.display.progress import Progress
    from ddplaunch.launcher.nodes import Nodes
    from ddplaunch.launcher.participants import Participants

_SWEEP_SHOWN_S = 2.0
_LOOK_S = 0.5
"""Seconds between two looks at all nodes, during a sweep."""


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
        return NEVER

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


class SweepNotice:
    """Says once that only sweeps keep the run from its end: a host without power does not answer for seconds."""

    def __init__(self, nodes: Nodes, show: Callable[[str, int], None]) -> None:
        self._nodes, self._show = nodes, show
        self._look_at = 0.0
        self._show_at = NEVER

    def run_due(self, now: float) -> float:
        """Tell it after ``_SWEEP_SHOWN_S``. Returns when to call again."""
        if not self._nodes.any_sweeping or now < self._look_at:
            return self._look_at if self._nodes.any_sweeping else NEVER
        self._look_at = now + _LOOK_S
        hosts = self._nodes.only_sweeping
        self._show_at = min(self._show_at, now + _SWEEP_SHOWN_S) if hosts else NEVER
        if now >= self._show_at:
            what = f"processes of this run are looked for on {quote(fold(hosts), 200)}"
            self._show(f"{what}, for up to {SWEEP_S:g} s", Level.NORMAL)
            self._look_at = NEVER
        return self._look_at
