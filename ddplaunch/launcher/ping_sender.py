"""Sends the pings, in a thread: an agent that receives none for some seconds stops its workers.

Runs in the launcher. The thread is not the main thread, which may be busy for seconds: with thousands of ranks it
explains a hang or writes a report meanwhile, or its disk does not answer. Both share the nodes that are pinged, and
their handles, whose ``send`` only queues.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError
from ddplaunch.protocol.launcher_agent import Ping
from ddplaunch.system.limits import NO_ROOM_HINT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddplaunch.launcher.nodes import Node

INTERVAL_S = 1.0
_SUSPENDED_S = 24 * 3600.0
"""Seconds for which agents accept that a suspended launcher (Ctrl-Z) sends no pings."""


class PingSender:
    """Pings nodes once a second. The main thread calls the methods; the thread is started by the first ``add``."""

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
            self._thread = threading.Thread(target=self._run, name="pings", daemon=True)
            try:
                self._thread.start()
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
        if self._thread and self._thread.is_alive():
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
