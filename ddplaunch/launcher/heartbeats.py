"""Which agents on other machines still answer: a cut connection alone is noticed by neither side for minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.launcher import signals
from ddplaunch.records import Ping

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddplaunch.launcher.handles import Node

BEAT_S = 1.0
_TOLD_S = 3.0
_SUSPENDED_S = 24 * 3600.0
"""How long agents go on without a launcher that has said that it will be stopped (Ctrl-Z)."""


class Heartbeats:
    """Asks every agent once a second. Times are ``time.monotonic()``'s.

    Attributes:
        deadline: when ``beat`` is due; never, as long as no agent is asked.
        lost_after_s: who has not answered for so long is lost.
    """

    def __init__(self, lost_after_s: float) -> None:
        """An agent that has not answered for ``lost_after_s`` is lost; it ends itself when it is not asked as long."""
        self.deadline = float("inf")
        self.lost_after_s = lost_after_s
        self._heard: dict[int, float] = {}
        self._unanswered: dict[int, int] = {}
        self._suspends_by: float | None = None

    def begin(self, node: Node, now: float, patience_s: float = 0.0) -> None:
        """Ask this one from now on, with all others; its first answer may take ``patience_s`` longer."""
        self._heard[node.index] = now + patience_s
        self._unanswered[node.index] = 0
        self.deadline = min(self.deadline, now + BEAT_S)

    def heard(self, node: Node, now: float) -> None:
        """It has answered."""
        if node.index in self._heard:
            self._heard[node.index] = now
            self._unanswered[node.index] -= 1

    def end(self, node: Node) -> None:
        """Nothing is asked of it any more."""
        self._heard.pop(node.index, None)
        self._unanswered.pop(node.index, None)

    def suspend(self, now: float, nodes: Iterable[Node]) -> None:
        """The user wants this process stopped for a while: ``beat`` does it, once all agents know that."""
        self._suspends_by = now + _TOLD_S
        self._ask(nodes, _SUSPENDED_S)
        self.deadline = self._suspends_by

    def beat(self, now: float, nodes: Iterable[Node], is_behind: bool) -> list[Node]:
        """Ask all of ``nodes`` that are asked at all; returns those that have not answered for too long.

        To be called after every event, and at ``deadline``. Nobody is returned if this process ``is_behind``: answers
        may be among what it has not looked at yet.
        """
        if self._suspends_by is not None:
            if now < self._suspends_by and any(self._unanswered.get(node.index) for node in nodes):
                return []
            self._suspends_by, self.deadline = None, now
            signals.suspend()
            return []
        if now < self.deadline:
            return []
        asked = [node for node in nodes if node.index in self._heard]
        # This process may itself have been stopped: what came meanwhile is in the mailbox, and not yet counted.
        was_stopped = now - self.deadline > BEAT_S
        if was_stopped:
            self._heard.update((node.index, max(now, self._heard[node.index])) for node in asked)
        self.deadline = now + BEAT_S if asked else float("inf")
        self._ask(asked, self.lost_after_s)
        return [node for node in asked if not is_behind and now - self._heard[node.index] > self.lost_after_s]

    def _ask(self, nodes: Iterable[Node], lost_after_s: float) -> None:
        for node in nodes:
            self._unanswered[node.index] = self._unanswered.get(node.index, 0) + 1
            node.handle.send(Ping(lost_after_s))
