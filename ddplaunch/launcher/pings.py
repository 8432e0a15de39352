"""Pings: detects agents on other machines that no longer answer; TCP would report a cut connection after minutes.

Runs in the launcher, in the main thread. It reports an unresponsive node; ``Run`` decides what follows.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddplaunch.protocol.launcher_agent import Ping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddplaunch.launcher.nodes import Node, Nodes
    from ddplaunch.mailbox import Mailbox

INTERVAL_S = 1.0
_SUSPEND_WAIT_S = 3.0
"""Seconds to wait for the agents' answers before this process suspends itself."""

_SUSPENDED_S = 24 * 3600.0
"""Seconds for which agents accept that a suspended launcher (Ctrl-Z) sends no pings."""

_NEVER = float("inf")


class Pings:
    """Pings every watched agent once a second. Times are ``time.monotonic()``'s."""

    def __init__(
        self,
        lost_after_s: float,
        nodes: Nodes,
        mailbox: Mailbox[object],
        on_unresponsive: Callable[[Node], None],
        suspend_process: Callable[[], None],
    ) -> None:
        """``on_unresponsive`` is called with a node that has not answered for ``lost_after_s``.

        An agent stops its workers when it receives no ping for ``lost_after_s`` seconds. ``suspend_process`` suspends
        this process, and returns when it goes on.
        """
        self.lost_after_s = lost_after_s
        self._nodes = nodes
        self._mailbox = mailbox
        self._on_unresponsive = on_unresponsive
        self._suspend_process = suspend_process
        self._deadline = _NEVER
        self._answered_at: dict[int, float] = {}
        self._unanswered: dict[int, int] = {}
        self._suspend_by: float | None = None

    def watch(self, node: Node, now: float, extra_s: float = 0.0) -> None:
        """Ping ``node`` from now on; its first answer may take ``extra_s`` longer.

        The first ping is sent at once: an agent that is cut off before any ping would wait for its launcher for ever.
        """
        self._answered_at[node.index] = now + extra_s
        self._ping([node], self.lost_after_s)
        self._deadline = min(self._deadline, now + INTERVAL_S)

    def unwatch(self, node: Node) -> None:
        """Ping ``node`` no longer."""
        self._answered_at.pop(node.index, None)
        self._unanswered.pop(node.index, None)

    def on_pong(self, node: Node, now: float) -> None:
        """``node`` has answered a ping."""
        if node.index in self._answered_at:
            self._answered_at[node.index] = now
            self._unanswered[node.index] -= 1

    def suspend(self, now: float) -> None:
        """The user pressed Ctrl-Z: suspend this process once all watched agents have answered a last ping."""
        self._suspend_by = now + _SUSPEND_WAIT_S
        self._ping(self._watched, _SUSPENDED_S)
        self._deadline = self._suspend_by

    def run_due(self, now: float) -> float:
        """Ping the agents, and report those that do not answer. Returns when the next ping is due."""
        if self._suspend_by is not None:
            self._suspend_if_announced(now)
        elif now >= self._deadline:
            self._check(now)
        return self._deadline

    def _suspend_if_announced(self, now: float) -> None:
        assert self._suspend_by is not None
        if now >= self._suspend_by or not any(self._unanswered.get(node.index) for node in self._watched):
            self._suspend_by, self._deadline = None, now
            self._suspend_process()

    @property
    def _watched(self) -> list[Node]:
        return [node for node in self._nodes.connected if node.index in self._answered_at]

    def _check(self, now: float) -> None:
        watched = self._watched
        if now - self._deadline > INTERVAL_S:  # This process was frozen and has sent no pings.
            self._answered_at.update((node.index, max(now, self._answered_at[node.index])) for node in watched)
        self._deadline = now + INTERVAL_S if watched else _NEVER
        self._ping(watched, self.lost_after_s)
        if self._mailbox.is_empty:  # Otherwise an answer may be among the unread events.
            for node in watched:
                if now - self._answered_at[node.index] > self.lost_after_s:
                    self._on_unresponsive(node)

    def _ping(self, nodes: Iterable[Node], lost_after_s: float) -> None:
        ping = Ping(lost_after_s, time.time())
        for node in nodes:
            self._unanswered[node.index] = self._unanswered.get(node.index, 0) + 1
            node.handle.send(ping)
