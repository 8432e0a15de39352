"""Usage samples of this node, in the agent's loop: every 2 s, and a last one before the workers are stopped.

Runs in the agent, in its main thread. ``UsageRecorder`` does the work; it is loaded when it is needed: a start, and a
run of less than a second, do not wait for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.agent.launcher_channel import Outbox
    from ddplaunch.agent.watches.gpus_of_job import GpusOfJob
    from ddplaunch.agent.watches.usage_recorder import UsageRecorder
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.protocol.specs import AgentSpec

_NEVER = float("inf")
_FIRST_S = 1.0
"""From the start of the workers to the first reading, and from that to the first sample."""

_LEAST_S = 0.1
"""A shorter span says little: the CPU time of a process is counted in steps of 10 ms."""


class UsageSampling:
    """Of the attempts of one node; the ``UsageWatch`` of its launcher gets the records.

    Attributes:
        due: when ``run_due`` is to be called next, by ``time.monotonic()``.
    """

    def __init__(self, spec: AgentSpec, outbox: Outbox, gpus: GpusOfJob | None) -> None:
        """``gpus``: None on a machine without GPUs, or if none are looked at."""
        self.due = _NEVER
        self._spec, self._outbox, self._gpus = spec, outbox, gpus
        self._group: WorkerGroup | None = None
        self._recorder: UsageRecorder | None = None
        self._began_at = self._read_at = 0.0

    def begin(self, group: WorkerGroup) -> None:
        """All workers of the attempt run."""
        if self._spec.usage != "off" and not group.all_ended:
            self._group, self._began_at = group, time.monotonic()
            self.due = self._began_at + _FIRST_S

    def run_due(self) -> bool:
        """Take a sample if it is time. Returns whether it was."""
        now = time.monotonic()
        if now < self.due or self._group is None:
            return False
        from ddplaunch.agent.watches.usage_recorder import UsageRecorder
        from ddplaunch.protocol.usage import PERIOD_S

        if self._recorder is None:
            self._recorder = UsageRecorder(self._spec, self._outbox, self._gpus)
        if self._recorder.attempt != self._group.attempt:
            self._recorder.begin(self._group, self._began_at)
            self.due = now + _FIRST_S
        else:
            self._recorder.sample(now)
            self.due = max(self.due + PERIOD_S, now + PERIOD_S / 2)  # Also after a suspension.
        self._read_at = now
        return True

    def take_last(self) -> None:
        """A worker has failed, or the workers are to be stopped: take a sample of the time before it."""
        if self._recorder is None or self._group is None or self._recorder.attempt != self._group.attempt:
            return  # It was too short.
        now = time.monotonic()
        if now - self._read_at >= _LEAST_S:
            self._recorder.sample(now, is_last=True)  # Files of workers can be read as long as these run.
            self._read_at, self.due = now, max(self.due, now + _FIRST_S)

    def end(self) -> None:
        """The workers of the attempt have ended: send what is left."""
        if self._recorder:
            self._recorder.end()
        self._group, self.due = None, _NEVER
