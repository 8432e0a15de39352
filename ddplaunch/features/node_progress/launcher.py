"""What a run waits for, for the user: the nodes that are not connected yet, and at the end the sweeps of lost nodes.

Runs in the launcher, in the main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import fold
from ddplaunch.errors import Level
from ddplaunch.launcher.nodes import SWEEP_S, NodeState
from ddplaunch.launcher.watches import Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.launcher.display.messages import UserMessages
    from ddplaunch.launcher.participants import Participants
    from ddplaunch.launcher.watches import RunServices

_SWEEP_SHOWN_S = 2.0
_LOOK_S = 0.5
"""Seconds between two looks at all nodes, during a sweep."""


class NodeProgress(Watch):
    """Shows the nodes that connect, and that only sweeps keep the run from its end: a host without power is silent."""

    def __init__(self, participants: Participants, messages: UserMessages) -> None:
        self._nodes, self._participants = participants.nodes, participants
        self._progress, self._show = messages.progress, messages.show
        self._is_connecting = False
        self._look_at = 0.0
        self._show_at = NEVER

    def run_due(self, now: float) -> float:
        """Show what the run waits for, if that takes long. Returns when to call again."""
        return min(self._show_connecting(), self._show_sweeps(now))

    def _show_connecting(self) -> float:
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

    def _show_sweeps(self, now: float) -> float:
        """Tell it once, after ``_SWEEP_SHOWN_S``."""
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


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (NodeProgress(run.participants, run.messages),)
