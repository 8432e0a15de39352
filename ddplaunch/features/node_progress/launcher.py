"""What a run waits for, for the user: nodes that are not connected yet, torch, and at the end sweeps of lost nodes.

Runs in the launcher, in the main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import fold
from ddplaunch.errors import Level
from ddplaunch.launcher.nodes import SWEEP_S, NodeState
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.launcher_agent import AttemptStarted
from ddplaunch.text import duration, quote

if TYPE_CHECKING:
    from ddplaunch.launcher.display.messages import UserMessages
    from ddplaunch.launcher.participants import Participants

_SWEEP_SHOWN_S = 2.0
_SLOW_IMPORT_S = 10.0
_LOOK_S = 0.5
"""Seconds between two looks at all nodes, during a sweep."""


class NodeProgress(Watch):
    """Shows the nodes that connect, a slow import of torch, and that only sweeps keep the run from its end.

    A host without power lets a sweep wait: it is silent.
    """

    def __init__(self, participants: Participants, messages: UserMessages) -> None:
        self._nodes, self._participants = participants.nodes, participants
        self._progress, self._show = messages.progress, messages.show
        self._is_connecting = False
        self._imports_s: dict[str, float] = {}
        self._look_at = 0.0
        self._show_at = NEVER

    def on_event(self, index: int, event: object) -> None:
        """Once the workers of all nodes run for the first time: tell that their start has waited for torch."""
        if not isinstance(event, AttemptStarted) or event.attempt:
            return
        self._imports_s[self._nodes.all[index].host] = event.import_s
        if len(self._imports_s) != len(self._participants.indices):
            return
        host, longest_s = max(self._imports_s.items(), key=lambda item: item[1])
        if longest_s >= _SLOW_IMPORT_S:
            on = f", on {quote(host)}" if len(self._imports_s) > 1 else ""
            self._show(
                f"the start waited {duration(longest_s)} for `import torch`{on}: --check measures it", Level.NORMAL
            )

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
