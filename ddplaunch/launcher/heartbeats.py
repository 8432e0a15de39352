"""Which agents on other machines still answer: a cut connection alone is noticed by neither side for minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.records import Ping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.launcher.handles import Node

BEAT_S = 1.0


class Heartbeats:
    """Asks every agent once a second. Times are ``time.monotonic()``'s.

    Attributes:
        deadline: when ``beat`` is due; never, as long as no agent is asked.
    """

    def __init__(self, lost_after_s: float) -> None:
        """An agent that has not answered for ``lost_after_s`` is lost; it ends itself when it is not asked as long."""
        self.deadline = float("inf")
        self._lost_after_s = lost_after_s
        self._heard: dict[int, float] = {}

    def begin(self, node: Node, now: float) -> None:
        """Ask this one from now on."""
        self._heard[node.index] = now
        self.deadline = min(self.deadline, now)

    def heard(self, node: Node, now: float) -> None:
        """It has answered."""
        self._heard[node.index] = now

    def beat(self, now: float, nodes: Sequence[Node]) -> list[Node]:
        """Ask all of ``nodes`` that are asked at all; returns those that have not answered for too long."""
        if now < self.deadline:
            return []
        asked = [node for node in nodes if node.index in self._heard]
        # This process may itself have been stopped: what came meanwhile is in the mailbox, and not yet counted.
        was_stopped = now - self.deadline > BEAT_S
        if was_stopped:
            self._heard.update((node.index, now) for node in asked)
        self.deadline = now + BEAT_S if asked else float("inf")
        for node in asked:
            node.handle.send(Ping(self._lost_after_s))
        return [node for node in asked if now - self._heard[node.index] > self._lost_after_s]
