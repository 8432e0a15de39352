"""Looks whether this host has the snapshot, and tells the workers of it. Runs in the agent, main thread."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.errors import LaunchError
from ddplaunch.features.snapshot.records import MARKER, SnapshotUsed

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker import Worker
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.protocol.results import Round
    from ddplaunch.protocol.specs import AgentSpec


def begin(spec: AgentSpec, _post: Callable[[object], None]) -> None:
    """Check that the snapshot is on this host.

    Raises:
        LaunchError: it is not.
    """
    text = spec.texts.get("snapshot")
    folder = json.loads(text)[1] if text else ""
    if folder and not os.path.exists(os.path.join(folder, MARKER)):
        hint = "All hosts must have the folder, on a file system that they share: --log-dir names another one."
        raise LaunchError(f"{spec.host}: there is no snapshot {folder} here", hint)


class SnapshotPart(Part):
    """The text for the workers is that of the agent."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        self._text = node.spec.texts.get("snapshot", "")

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """Where each node has a launcher, tell which snapshot this node has."""
        super().on_attempt(group, round_)
        if self._text and self._node.spec.each_node_has_launcher:
            self._node.report(SnapshotUsed(round_.attempt, self._node.spec.host, json.loads(self._text)[2]))

    def for_worker(self, worker: Worker) -> dict[str, str]:
        """The folder of the code, and its snapshot."""
        return {"snapshot": self._text} if self._text else {}


part = SnapshotPart
