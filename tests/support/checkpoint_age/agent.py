"""Looks at the checkpoint once a second. Runs in the agent, in the main thread and in one that looks."""

from __future__ import annotations

import os
import time

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.agent.workers.worker_group import WorkerGroup
from ddplaunch.features.checkpoint_age.records import CheckpointAge
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.results import Round
from ddplaunch.threads import post_from_thread

_PERIOD_S = 1.0


class CheckpointPart(Part):
    """Reports the age of the checkpoint."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        self._file = node.spec.texts.get("checkpoint_age", "")
        self._attempt, self._due = 0, NEVER

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """Look from now on."""
        self._attempt, self._due = round_.attempt, 0.0 if self._file else NEVER

    def run_due(self, now: float) -> float:
        """Look, in a thread: the file system may not answer. Returns when to call again."""
        if now >= self._due:
            self._due = NEVER
            attempt, host, file = self._attempt, self._node.spec.host, self._file
            unknown = CheckpointAge(attempt, host, None)
            post_from_thread("checkpoint", lambda: CheckpointAge(attempt, host, _age_s(file)), self._node.post, unknown)
        return self._due

    def on_event(self, event: object) -> bool:
        """Report what the thread has found."""
        if not isinstance(event, CheckpointAge):
            return False
        self._due = time.monotonic() + _PERIOD_S
        self._node.report(event)
        return True


def _age_s(file: str) -> float | None:
    try:
        return max(0.0, time.time() - os.stat(file).st_mtime)
    except OSError:
        return None


part = CheckpointPart
