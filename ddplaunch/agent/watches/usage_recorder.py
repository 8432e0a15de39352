"""Records of usage samples for the launcher, one every 10 s.

Runs in the agent, in its main thread. A launcher that does not read costs no memory: what waits is merged. The samples
of an attempt are sent before its result.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.agent.watches.usage_sampler import DiskUse, UsageSampler
from ddplaunch.protocol.usage import MAX_SAMPLES, PERIOD_S, RECORD_S, UsageSampled, UsageStarted, UsedGpu, mean

if TYPE_CHECKING:
    from ddplaunch.agent.launcher_channel import Outbox
    from ddplaunch.agent.watches.gpus_of_job import GpusOfJob
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.protocol.specs import AgentSpec
    from ddplaunch.protocol.usage import UsageSample

_PER_RECORD = round(RECORD_S / PERIOD_S)


class UsageRecorder:
    """Records of one node.

    Attributes:
        attempt: the newest that was begun; -1 before.
    """

    def __init__(self, spec: AgentSpec, outbox: Outbox, gpus: GpusOfJob | None) -> None:
        self._sends_means, self._outbox, self._gpus = spec.usage == "mean", outbox, gpus
        self._disk = DiskUse(spec.node_dir)
        self._sampler: UsageSampler | None = None
        self.attempt = -1
        self._recent: list[UsageSample] = []
        self._waiting: list[UsageSample] = []
        self._per_record = 1

    def begin(self, group: WorkerGroup, at_s: float) -> None:
        """Read the counters from which the first sample of an attempt starts; the workers run since ``at_s``."""
        self.attempt, self._recent, self._waiting, self._per_record = group.attempt, [], [], 1
        self._sampler = UsageSampler(group.workers, self._gpus, self._disk)
        self._outbox.send(self._started(tuple(worker.rank for worker in group.workers), at_s))

    def sample(self, now: float, *, is_last: bool = False) -> None:
        """Take a sample; send those that make a record. ``is_last``: send it at once, with no mean."""
        if self._sampler:
            self._recent.append(self._sampler.sample(now))
            if is_last or len(self._recent) >= self._per_record:
                self._send(self._sampler, is_last=is_last)
                self._per_record = _PER_RECORD  # The first sample is sent at once, for those who look.

    def end(self) -> None:
        """The attempt has ended: send what is left, with no mean."""
        if self._sampler:
            if self._recent or self._waiting:
                self._send(self._sampler, is_last=True)
            self._sampler.close()
            self._sampler = None

    def _send(self, sampler: UsageSampler, *, is_last: bool = False) -> None:
        recent = sampler.with_children(self._recent) if self._recent else []
        self._recent = []
        self._waiting += [mean(recent)] if recent and self._sends_means and not is_last else recent
        if self._outbox.send_if_read(UsageSampled(self.attempt, tuple(self._waiting))):
            self._waiting = []
        elif len(self._waiting) > MAX_SAMPLES - _PER_RECORD:
            self._waiting = [mean(self._waiting[at : at + 2]) for at in range(0, len(self._waiting), 2)]

    def _started(self, ranks: tuple[int, ...], at_s: float) -> UsageStarted:
        gpus = self._gpus.health if self._gpus else ()
        return UsageStarted(
            attempt=self.attempt,
            at_s=at_s,
            ranks=ranks,
            gpus=tuple(UsedGpu(gpu.index, gpu.uuid, gpu.name, max(0, gpu.memory_bytes or 0)) for gpu in gpus),
            gpu_of_worker=tuple(map(self._gpus.row_of_worker, range(len(ranks)))) if self._gpus else (),
            cpus=os.cpu_count() or 0,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )
