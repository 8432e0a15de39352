"""Pings: detects agents on other machines that no longer answer; TCP would report a cut connection after minutes.

Runs in the launcher. A thread sends the pings, because an agent that receives none for some seconds stops its workers.
The main thread reports a node that does not answer; ``lost_nodes`` decides what follows.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.launcher_agent import Ping
from ddplaunch.system.limits import NO_ROOM_HINT
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddplaunch.launcher.nodes import Node, Nodes
    from ddplaunch.mailbox import Mailbox
    from ddplaunch.protocol.launcher_agent import Pong

INTERVAL_S = 1.0
"""Seconds between two pings of a node."""

_SUSPEND_WAIT_S = 3.0
"""Seconds to wait for the agents' answers before this process suspends itself."""

_SUSPENDED_S = 24 * 3600.0
"""Seconds for which agents accept that a suspended launcher (Ctrl-Z) sends no pings."""


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
        """``on_unresponsive`` is called once with a node that has not answered for ``lost_after_s``.

        An agent stops its workers when it receives no ping for ``lost_after_s`` seconds. ``suspend_process`` suspends
        this process, and returns when it goes on.
        """
        self.lost_after_s = lost_after_s
        self._nodes = nodes
        self._mailbox = mailbox
        self._on_unresponsive = on_unresponsive
        self._suspend_process = suspend_process
        self._sender = _Sender(lost_after_s)
        self._deadline = NEVER
        self._answered_at: dict[int, float] = {}
        self._suspend_by: float | None = None
        self._last_ping_s = 0.0
        self._not_told: set[int] = set()
        """Nodes that have not answered the last ping before this process suspends itself."""

    def watch(self, node: Node, now: float, extra_s: float = 0.0) -> None:
        """Ping ``node`` from now on; its first answer may take ``extra_s`` longer.

        The first ping is sent at once: an agent that is cut off before any ping would wait for its launcher for ever.

        Raises:
            LaunchError: no room for the thread that pings.
        """
        self._answered_at[node.index] = now + extra_s
        self._sender.add(node)
        self._deadline = min(self._deadline, now + INTERVAL_S)

    def on_pong(self, node: Node, pong: Pong, now: float) -> None:
        """``node`` has answered a ping."""
        if node.index in self._answered_at:
            self._answered_at[node.index] = now
        if pong.ping_time_s == self._last_ping_s:
            self._not_told.discard(node.index)

    def suspend(self, now: float) -> None:
        """The user pressed Ctrl-Z: suspend this process once all watched agents have answered a last ping."""
        self._not_told = {node.index for node in self._watched}
        self._last_ping_s = self._sender.pause()
        self._suspend_by = self._deadline = now + _SUSPEND_WAIT_S

    def run_due(self, now: float) -> float:
        """Report the nodes that do not answer. Returns when to call again."""
        if self._suspend_by is not None:
            self._suspend_if_announced(now)
        elif now >= self._deadline:
            self._check(now)
        return self._deadline

    def close(self) -> None:
        """Send no more pings."""
        self._sender.close()

    def _suspend_if_announced(self, now: float) -> None:
        assert self._suspend_by is not None
        if now >= self._suspend_by or not any(node.index in self._not_told for node in self._watched):
            self._suspend_by, self._deadline = None, now
            self._suspend_process()
            self._sender.go_on()

    def _unwatch(self, node: Node) -> None:
        self._answered_at.pop(node.index, None)
        self._sender.remove(node)

    @property
    def _watched(self) -> list[Node]:
        return [node for node in self._nodes.connected if node.index in self._answered_at]

    def _check(self, now: float) -> None:
        watched = self._watched
        if now - self._deadline > INTERVAL_S:  # This thread was busy or frozen, and has read no answers.
            self._answered_at.update((node.index, max(now, self._answered_at[node.index])) for node in watched)
        self._deadline = now + INTERVAL_S if watched else NEVER
        if self._mailbox.is_empty:  # Otherwise an answer may be among the unread events.
            for node in watched:
                answered_at = max(self._answered_at[node.index], node.handle.heard_at)
                if now - answered_at > self.lost_after_s:
                    self._unwatch(node)
                    self._on_unresponsive(node)


class _Sender:
    """Pings nodes once a second. The main thread calls the methods; the thread is started by the first ``add``.

    The main thread may be busy for seconds: with thousands of ranks it explains a failure or writes a report meanwhile,
    or its disk does not answer. Both threads share the nodes that are pinged, and their handles, whose ``send`` only
    queues.
    """

    def __init__(self, lost_after_s: float) -> None:
        """An agent may stop its workers when it receives no ping for ``lost_after_s`` seconds."""
        self._lost_after_s = lost_after_s
        self._nodes: dict[int, Node] = {}
        self._lock = threading.Lock()
        """Held while pings are sent, so that none follows the last one before a pause."""
        self._is_paused = False
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def add(self, node: Node) -> None:
        """Ping ``node`` now, and every ``INTERVAL_S`` as long as it has an agent.

        Raises:
            LaunchError: no room for a thread.
        """
        with self._lock:
            self._nodes[node.index] = node
            self._send([node], _SUSPENDED_S if self._is_paused else self._lost_after_s)
        if self._thread is None:
            try:
                self._thread = in_thread("pings", self._run)
            except RuntimeError as error:
                raise LaunchError(f"the launcher cannot ping its nodes: {error}", NO_ROOM_HINT) from None

    def remove(self, node: Node) -> None:
        """Ping ``node`` no longer."""
        with self._lock:
            self._nodes.pop(node.index, None)

    def pause(self) -> float:
        """Tell all agents that no pings follow for long, and send none until ``go_on``. Returns that ping's time."""
        with self._lock:
            self._is_paused = True
            return self._send(self._nodes.values(), _SUSPENDED_S)

    def go_on(self) -> None:
        """Ping all nodes, now and from now on."""
        self._is_paused = False
        self.beat()

    def beat(self) -> None:
        """Ping all nodes once, unless the pings pause. Any thread."""
        with self._lock:
            if not self._is_paused:
                self._send(self._nodes.values(), self._lost_after_s)

    def close(self) -> None:
        """Send no more pings; the thread has ended when this returns."""
        self._closed.set()
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            self.beat()

    def _send(self, nodes: Iterable[Node], lost_after_s: float) -> float:
        ping = Ping(lost_after_s, time.time())
        for node in nodes:
            if node.state.has_agent:
                node.handle.send(ping)
        return ping.time_s
