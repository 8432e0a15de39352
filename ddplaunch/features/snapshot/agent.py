"""Looks whether this host has the snapshot, and tells the workers of it. Runs in the agent, main thread."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.errors import LaunchError
from ddplaunch.features.snapshot.records import MARKER, SnapshotUsed
from ddplaunch.mailbox import NEVER

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker import Worker
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.protocol.results import Round
    from ddplaunch.protocol.specs import AgentSpec

_TOUCH_S = 12 * 3600.0


def begin(spec: AgentSpec, _post: Callable[[object], None]) -> None:
    """Check that the snapshot is on this host. If it was sent, the agent may have begun outside of it: enter it.

    Raises:
        LaunchError: it is not.
    """
    said = json.loads(spec.texts.get("snapshot", '{"copy": ""}'))
    named = said["copy"]
    folder = os.path.expanduser(named)
    if folder and not os.path.exists(os.path.join(folder, MARKER)):
        hint = "All hosts must have the folder, on a file system that they share: --log-dir names another one."
        if named != folder:  # Of --sync.
            hint = "It was sent to this host, and has been deleted since: start the run again."
        raise LaunchError(f"{spec.host}: there is no snapshot {folder} here", hint)
    if "cwd" in said:
        from ddplaunch.features.snapshot import receive

        receive.end()
        os.chdir(os.path.expanduser(said["cwd"]))


class SnapshotPart(Part):
    """The snapshot of this node."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        self._text = node.spec.texts.get("snapshot", "")
        self._said = json.loads(self._text or "{}")
        self._touch_at = 0.0 if self._text else NEVER

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """Where each node has a launcher, tell which snapshot this node has."""
        super().on_attempt(group, round_)
        if self._text and self._node.spec.each_node_has_launcher:
            self._node.report(SnapshotUsed(round_.attempt, self._node.spec.host, self._said["content"]))

    def run_due(self, now: float) -> float:
        """A snapshot that is used is not deleted."""
        if now >= self._touch_at:
            self._touch_at = now + _TOUCH_S
            with contextlib.suppress(OSError):
                os.utime(os.path.join(os.path.expanduser(self._said["copy"]), MARKER))
        return self._touch_at

    def for_worker(self, worker: Worker) -> dict[str, str]:
        """The folders of the code, and their copy, as a JSON list; the copy first."""
        if not self._text:
            return {}
        return {"snapshot": json.dumps([*map(os.path.expanduser, (self._said["copy"], *self._said["roots"]))])}


part = SnapshotPart
