"""Which agents are gone: as they should be after their last record, or lost with their node. Main thread only."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from ddplaunch import verdict
from ddplaunch.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddplaunch.launcher.attempts import Attempts
    from ddplaunch.launcher.handles import Node
    from ddplaunch.launcher.heartbeats import Heartbeats
    from ddplaunch.launcher.nodes import Nodes
    from ddplaunch.launcher.stopping import Stopping
    from ddplaunch.model import AttemptResult

_KILLED_HINT = "SIGKILL comes from somebody's kill, the kernel's out-of-memory killer or a job scheduler."


class Losses:
    """Sees that a lost node is replaced, done without, or ends the run."""

    def __init__(
        self,
        nodes: Nodes,
        attempts: Attempts,
        heartbeats: Heartbeats,
        stopping: Stopping,
        all_ended: Callable[[Iterable[AttemptResult]], None],
        say: Callable[[str, int], None],
    ) -> None:
        """``all_ended`` hears of the attempts that a loss completes."""
        self._nodes = nodes
        self._attempts = attempts
        self._heartbeats = heartbeats
        self._stopping = stopping
        self._all_ended = all_ended
        self._say = say

    def lose_silent(self, is_behind: bool) -> None:
        """Machines that are frozen or cut off; ``is_behind`` as for ``Heartbeats.beat``."""
        for node in self._heartbeats.beat(time.monotonic(), self._nodes.running, is_behind):
            node.handle.kill()
            if node.sends_logs:  # It has told all that the verdict needs; the end of its channel follows.
                self._heartbeats.end(node)
                continue
            self._lose(node, f"{node.host} has not answered for {self._heartbeats.lost_after_s:g} s")

    def gone(self, node: Node) -> None:
        """The channel has ended: as it should after the agent's last record, else the node is lost."""
        if node.state == "lost":  # It was silent before.
            return
        returncode = node.handle.close()
        if node.left is not None:
            node.state = "ended"
            self.left(node)
        elif returncode is None:
            self._lose(node, f"the connection to {node.host} has ended")
        else:
            hint = _KILLED_HINT if returncode == -signal.SIGKILL else ""
            self._lose(node, f"the agent on {node.host} ended by {verdict.describe(returncode)}", hint)

    def left(self, node: Node) -> None:
        """Its work is done and told."""
        self._all_ended(self._attempts.lost(node.index))
        if self._nodes.place and not self._stopping.is_on:
            self._stopping.follow()

    def _lose(self, node: Node, why: str, hint: str = "") -> None:
        decided = self._attempts.are_decided
        is_needed = not (self._nodes.place and (self._stopping.follows or decided))
        try:
            self._nodes.lost(node, why, hint, may_go_on=not (self._stopping.is_on or decided))
        except LaunchError as error:
            if is_needed and not self._stopping.has_killed:
                self._stopping.fail_by(error)
            else:
                self._say(why, 1 if self._stopping.has_killed else -1)  # Killed by us: that is told already.
        self._all_ended(self._attempts.lost(node.index))
