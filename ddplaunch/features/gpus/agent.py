"""The GPUs that the workers of this node may use: as they were read last, what they do now, and who uses them.

Runs in the agent, in its main thread. They are read by ``GpuReader``, whose thread posts its answers as events: a
GpusRead or GpuEvent, which other parts of the agent get after ``GpusOfJob``. Nothing here blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.features.gpus.records import Gpu, GpuReading, GpusRead, Question
from ddplaunch.mailbox import NEVER
from ddplaunch.system import devices

if TYPE_CHECKING:
    from ddplaunch.agent.workers.start_plan import Placement
    from ddplaunch.features.gpus.reader import Answer
    from ddplaunch.protocol.specs import AgentSpec


def begin(spec: AgentSpec, post: Callable[[object], None]) -> GpusOfJob | None:
    """Start to read the GPUs. None if there are none, if the user wants none read, and in a dry run."""
    if spec.health == "off" or spec.dry_run or not (devices.has_nvml() or devices.is_amd()):
        return None
    return GpusOfJob(spec, post)


def of_job(node: NodeServices) -> GpusOfJob | None:
    """The GPUs that the workers of this node may use; None where ``begin`` reads none."""
    gpus: GpusOfJob | None = node.begun.get("gpus")
    return gpus


def part(node: NodeServices) -> Part:
    """The GPUs of the job: as a part they get their events before others get these."""
    gpus = of_job(node)
    if gpus is None:
        return Part(node)
    gpus.placement = node.placement
    return gpus


class GpusOfJob(Part):
    """The GPUs that the workers of one node may use.

    Attributes:
        placement: says which GPUs those are; to be set before the first event is handled.
        is_read: the first answer has come.
        usage: when the driver has last answered what the GPUs do (``time.monotonic()``), and the answer, by index.
            Any part may read it. The samples of ``features.usage`` ask; in a run without them it stays empty, as before
            the first answer, with a time of minus infinity.
    """

    def __init__(self, spec: AgentSpec, post: Callable[[object], None]) -> None:
        """Start to read the GPUs, before the agent has its other services.

        ``post`` appends an event to the agent's mailbox; any thread may call it.
        """
        self._task, self._post = spec.task, post
        self.usage: tuple[float, dict[int, GpuReading]] = (-NEVER, {})
        self._is_usage_asked = False
        self._gpus: dict[int, GpuReading] = {}
        self.placement: Placement
        self.is_read = False
        from ddplaunch.features.gpus.reader import GpuReader  # A machine without GPUs does not load it.

        self._reader = GpuReader.start(self._on_answer_in_thread)
        self.ask("health")

    def ask(self, question: Question) -> bool:
        """An event follows: a GpusRead. False if there is nobody to ask."""
        if self._reader:
            self._reader.ask(question)
        return self._reader is not None

    def _on_answer_in_thread(self, answer: Answer) -> None:
        """Also called in the thread of the reader. Usage is only kept: it must not wake the main thread."""
        if isinstance(answer, GpusRead) and answer.question == "usage":
            self.usage, self._is_usage_asked = (time.monotonic(), {gpu.index: gpu for gpu in answer.gpus}), False
        else:
            self._post(answer)

    def on_event(self, event: object) -> bool:
        """Take what identifies the GPUs, and their health, from an answer of the reader, which is also for others."""
        if isinstance(event, GpusRead) and event.question == "health":
            known = (_identified(gpu, self._gpus.get(gpu.index)) for gpu in event.gpus)
            self._gpus = {gpu.index: gpu for gpu in known if self.local_ranks(gpu)} or self._gpus
            self.is_read = True
        return False

    @property
    def gpus(self) -> tuple[GpuReading, ...]:
        """As they were read last."""
        return tuple(self._gpus.values())

    def local_ranks(self, gpu: Gpu) -> tuple[int, ...]:
        """Local ranks of the workers that use the GPU."""
        placement, task = self.placement, self._task
        ranks = range(placement.local_world_size)
        users = (rank for rank in ranks if any(map(gpu.is_named, placement.devices_of(rank))))
        return tuple(task.local_rank if task else rank for rank in users)

    def row_of_worker(self, local_rank: int) -> int | None:
        """Position in ``gpus`` of the GPU that a worker probably uses; of several, the first."""
        of_each = [self.placement.devices_of(rank) for rank in range(self.placement.local_world_size)]
        names = of_each[local_rank]
        if len(of_each) > 1 and len(set(of_each)) == 1:  # All workers see all GPUs.
            names = names[local_rank : local_rank + 1]
        found = (row for row, gpu in enumerate(self.gpus) if names and gpu.is_named(names[0]))
        return next(found, None)

    def next_usage(self) -> dict[int, GpuReading]:
        """What the GPUs did at the last call, by index, and ask again. Empty while the driver does not answer.

        Only for ``features.usage``: of two callers each would miss values. Other parts of the agent read ``usage``,
        watches get samples, ``UsageSampled``.
        """
        if self._is_usage_asked:  # The last question still waits.
            return {}
        self._is_usage_asked = self.ask("usage")
        return self.usage[1]

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the reader, which a sweep of this agent's descendants must leave alone."""
        return (self._reader.pid,) if self._reader else ()

    def close(self) -> None:
        """End the reader's process."""
        if self._reader:
            self._reader.close()


def _identified(gpu: GpuReading, before: GpuReading | None) -> GpuReading:
    """``gpu``, with what identifies it as in an earlier reading: of a GPU that is lost, NVML tells only the index."""
    if before is None or gpu.uuid:
        return gpu
    return replace(gpu, uuid=before.uuid, name=before.name, pci_address=before.pci_address)
