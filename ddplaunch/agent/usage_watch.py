"""Usage samples of this node: one every 2 s while workers run, one record for the launcher every 10 s.

Runs in the agent, in its main thread. A launcher that does not read costs no memory: what waits is merged. Records of
workers come first; samples of an ended attempt are sent before its result.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ddplaunch.protocol.usage import MAX_SAMPLES, PERIOD_S, RECORD_S, UsageSampled, UsageStarted, UsedGpu, mean

if TYPE_CHECKING:
    from ddplaunch.agent.gpus_of_job import GpusOfJob
    from ddplaunch.agent.launcher_channel import Outbox
    from ddplaunch.agent.usage_sampler import DiskUse, UsageSampler
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.protocol.specs import AgentSpec
    from ddplaunch.protocol.usage import UsageSample

_NEVER = float("inf")
_PER_RECORD = round(RECORD_S / PERIOD_S)


class UsageWatch:
    """Samples one node.

    Attributes:
        due: when ``run_due`` is to be called next, by ``time.monotonic()``.
    """

    def __init__(self, spec: AgentSpec, outbox: Outbox, gpus: GpusOfJob | None) -> None:
        """Nothing is read before ``begin``. ``gpus``: None on a machine without GPUs, or if none are looked at."""
        self.due = _NEVER
        self._how, self._outbox, self._gpus = spec.usage, outbox, gpus
        self._node_dir = spec.node_dir
        self._disk: DiskUse | None = None
        self._sampler: UsageSampler | None = None
        self._attempt = 0
        self._recent: list[UsageSample] = []
        self._waiting: list[UsageSample] = []

    def begin(self, group: WorkerGroup) -> None:
        """All workers of the attempt run."""
        if self._how == "off" or group.all_ended:
            return
        from ddplaunch.agent.usage_sampler import DiskUse, UsageSampler  # The workers do not wait for the import.

        self._disk = self._disk or DiskUse(self._node_dir)
        self._attempt, self._recent, self._waiting = group.attempt, [], []
        self._sampler = UsageSampler(group.workers, self._gpus, self._disk)
        self.due = time.monotonic() + PERIOD_S
        self._outbox.send(self._started([worker.rank for worker in group.workers]))

    def run_due(self) -> bool:
        """Take a sample if it is time. Returns whether it was."""
        now = time.monotonic()
        if now < self.due or self._sampler is None:
            return False
        self.due = max(self.due + PERIOD_S, now + PERIOD_S / 2)  # Also after a suspension.
        self._recent.append(self._sampler.sample(now))
        if len(self._recent) >= _PER_RECORD:
            self._send()
        return True

    def end(self) -> None:
        """The workers of the attempt have ended, or are stopped: send what is left."""
        if self._sampler:
            if self._recent or self._waiting:
                self._send()
            self._sampler.close()
            self._sampler, self.due = None, _NEVER

    def _send(self) -> None:
        assert self._sampler
        recent = self._sampler.with_children(self._recent) if self._recent else []
        self._recent = []
        self._waiting += [mean(recent)] if recent and self._how == "mean" else recent
        if self._outbox.send_if_read(UsageSampled(self._attempt, tuple(self._waiting))):
            self._waiting = []
        elif len(self._waiting) > MAX_SAMPLES - _PER_RECORD:
            self._waiting = [mean(self._waiting[at : at + 2]) for at in range(0, len(self._waiting), 2)]

    def _started(self, ranks: list[int]) -> UsageStarted:
        gpus = self._gpus.health if self._gpus else ()
        return UsageStarted(
            attempt=self._attempt,
            at_s=time.monotonic(),
            ranks=tuple(ranks),
            gpus=tuple(UsedGpu(gpu.index, gpu.uuid, gpu.name, gpu.memory_bytes or 0) for gpu in gpus),
            gpu_of_worker=tuple(map(self._gpus.row_of_worker, range(len(ranks)))) if self._gpus else (),
            cpus=os.cpu_count() or 0,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )
