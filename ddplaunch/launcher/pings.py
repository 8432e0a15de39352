"""Pings: detects agents on other machines that no longer answer; TCP would report a cut connection after minutes.

Runs in the launcher. A thread sends the pings, because an agent that receives none for some seconds stops its workers.
The main thread reports a node that does not answer; ``lost_nodes`` decides what follows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError
from ddplaunch.mailbox import NEVER, Mailbox
from ddplaunch.protocol.launcher_agent import Ping, Pong
from ddplaunch.system.limits import NO_ROOM_HINT
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from ddplaunch.launcher.nodes import Node

INTERVAL_S = 1.0
"""Seconds between two pings of a node."""

_SUSPEND_WAIT_S = 3.0
"""Seconds to wait for the agents' answers before this process suspends itself."""

_SUSPENDED_S = 24 * 3600.0
"""Seconds for which agents accept that a suspended launcher (Ctrl-Z) sends no pings."""


class Pings:
    """Pings every watched agent once a second. Times are ``time.monotonic()``'s.

    The main thread calls the methods, and a thread, which the first ``watch`` starts, calls ``beat``. For the main
    thread may be busy for seconds: with thousands of ranks it explains a failure or writes a report, or its disk does
    not answer. Both threads share the nodes that are pinged, and their handles, whose ``send`` only queues.
    """

    def __init__(
        self,
        lost_after_s: float,
        mailbox: Mailbox[object],
        on_unresponsive: Callable[[Node], None],
        suspend_process: Callable[[], None],
    ) -> None:
        """``on_unresponsive`` is called once with a node that has not answered for ``lost_after_s``.

        An agent stops its workers when it receives no ping for ``lost_after_s`` seconds. ``suspend_process`` suspends
        this process, and returns when it goes on.
        """
        self.lost_after_s = lost_after_s
        self._mailbox = mailbox
        self._on_unresponsive = on_unresponsive
        self._suspend_process = suspend_process
        self._pinged: dict[int, Node] = {}
        self._lock = threading.Lock()
        """Held while pings are sent, so that none follows the last one before a pause."""
        self._deadline = NEVER
        self._answered_at: dict[int, float] = {}
        self._is_paused = False
        self._suspend_by: float | None = None
        self._last_ping_s = 0.0
        self._not_told: set[int] = set()
        """Nodes that have not answered the last ping before this process suspends itself."""
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def watch(self, node: Node, now: float, extra_s: float = 0.0) -> None:
        """Ping ``node`` from now on; its first answer may take ``extra_s`` longer.

        The first ping is sent at once: an agent that is cut off before any ping would wait for its launcher for ever.

        Raises:
            LaunchError: no room for the thread that pings.
        """
        self._answered_at[node.index] = now + extra_s
        self._deadline = min(self._deadline, now + INTERVAL_S)
        with self._lock:
            self._pinged[node.index] = node
            self._send([node], _SUSPENDED_S if self._is_paused else self.lost_after_s)
        if self._thread is None:
            try:
                self._thread = in_thread("pings", self._run)
            except RuntimeError as error:
                raise LaunchError(f"the launcher cannot ping its nodes: {error}", NO_ROOM_HINT) from None

    def on_pong(self, node: Node, pong: Pong, now: float) -> None:
        """``node`` has answered a ping."""
        if node.index in self._pinged:
            self._answered_at[node.index] = now
        if pong.ping_time_s == self._last_ping_s:
            self._not_told.discard(node.index)

    def suspend(self, now: float) -> None:
        """The user pressed Ctrl-Z: suspend this process once all watched agents have answered a last ping."""
        self._not_told = {node.index for node in self._watched}
        with self._lock:
            self._is_paused = True
            self._last_ping_s = self._send(self._watched, _SUSPENDED_S)
        self._suspend_by = self._deadline = now + _SUSPEND_WAIT_S

    def run_due(self, now: float) -> float:
        """Report the nodes that do not answer. Returns when to call again."""
        if self._suspend_by is not None:
            self._suspend_if_told(now)
        elif now >= self._deadline:
            self._check(now)
        return self._deadline

    def close(self) -> None:
        """Send no more pings; the thread has ended when this returns."""
        self._closed.set()
        if self._thread:
            self._thread.join()

    def _suspend_if_told(self, now: float) -> None:
        assert self._suspend_by is not None
        if now >= self._suspend_by or not any(node.index in self._not_told for node in self._watched):
            self._suspend_by, self._deadline = None, now
            self._suspend_process()
            self._is_paused = False
            self.beat()

    @property
    def _watched(self) -> list[Node]:
        return [node for node in self._pinged.values() if node.state.has_agent]

    def _check(self, now: float) -> None:
        watched = self._watched
        if now - self._deadline > INTERVAL_S:  # This thread was busy or frozen, and has read no answers.
            self._answered_at.update((node.index, max(now, self._answered_at[node.index])) for node in watched)
        self._deadline = now + INTERVAL_S if watched else NEVER
        if self._mailbox.is_empty:  # Otherwise an answer may be among the unread events.
            for node in watched:
                answered_at = max(self._answered_at[node.index], node.handle.heard_at)
                if now - answered_at > self.lost_after_s:
                    with self._lock:
                        del self._pinged[node.index]
                    self._on_unresponsive(node)

    # In the thread.

    def _run(self) -> None:
        due = time.monotonic() + INTERVAL_S
        while not self._closed.wait(due - time.monotonic()):
            self.beat()
            due = max(due + INTERVAL_S, time.monotonic())

    def beat(self) -> None:
        """Ping all nodes once, unless the pings pause. Any thread."""
        with self._lock:
            if not self._is_paused:
                self._send(self._watched, self.lost_after_s)

    def _send(self, nodes: Iterable[Node], lost_after_s: float) -> float:
        """Returns the time that the ping has, by which its answers are known."""
        ping = Ping(lost_after_s, time.time())
        for node in nodes:
            node.handle.send(ping)
        return ping.time_s
