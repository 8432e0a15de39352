"""Usage samples of this node, in the agent's loop: every 2 s, and a last one before the workers are stopped.

Runs in the agent, in its main thread. ``UsageRecorder`` does the work; it is loaded when it is needed: a start, and a
run of less than a second, do not wait for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.features.gpus.agent import of_job
from ddplaunch.mailbox import NEVER

if TYPE_CHECKING:
    from ddplaunch.agent.workers.exit_details import AttemptFailure
    from ddplaunch.features.usage.usage_recorder import DiskUse, UsageRecorder
    from ddplaunch.protocol.results import WorkerExit

_FIRST_S = 1.0
"""From the start of the workers to the first reading, and from that to the first sample."""

_LEAST_S = 0.1
"""A shorter span says little: the CPU time of a process is counted in steps of 10 ms."""


class UsagePart(Part):
    """Of the attempts of one node; the ``UsageWatch`` of its launcher gets the records."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        self._due = NEVER
        self._recorder: UsageRecorder | None = None
        """Of the attempt, once it has run for a second."""
        self._disk: DiskUse | None = None
        self._began_at = self._read_at = 0.0

    def on_started(self) -> None:
        """As ``Part.on_started``."""
        output = self._node.spec.output
        is_read = output.samples and (output.keeps_files or output.metrics_file)
        if is_read and self._group and not self._group.all_ended:
            self._began_at = time.monotonic()
            self._due = self._began_at + _FIRST_S

    def run_due(self, now: float) -> float:
        """Take a sample if it is time."""
        if now < self._due or self._group is None:
            return self._due
        from ddplaunch.features.usage.records import PERIOD_S
        from ddplaunch.features.usage.usage_recorder import DiskUse, UsageRecorder

        if self._recorder is None:
            self._disk = self._disk or DiskUse(self._group.spec.node_dir)
            gpus = of_job(self._node)
            self._recorder = UsageRecorder(self._group, self._began_at, self._node.outbox, gpus, self._disk)
            self._due = now + _FIRST_S
        else:
            self._recorder.sample(now)
            self._due = max(self._due + PERIOD_S, now + PERIOD_S / 2)  # Also after a suspension.
        self._read_at = now
        return self._due

    def before_stop(self, failure: AttemptFailure | None) -> None:
        """Unless all workers have succeeded, take a sample of the time before a failure or a stop."""
        group = self._group
        if group is None or self._recorder is None or (group.all_ended and not group.any_failed):
            return
        now = time.monotonic()
        if now - self._read_at >= _LEAST_S:
            self._recorder.sample(now, is_last=True)  # Files of workers can be read as long as these run.
            self._read_at, self._due = now, max(self._due, now + _FIRST_S)

    def on_attempt_ended(self, exits: tuple[WorkerExit, ...]) -> tuple[WorkerExit, ...]:
        """Send what is left."""
        if self._recorder:
            self._recorder.end()
        self._group, self._recorder, self._due = None, None, NEVER
        return exits


part = UsagePart
