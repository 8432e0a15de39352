"""Takes usage samples of one attempt's workers, this node's GPUs and the node itself.

Runs in the agent, in its main thread: a sample takes less than a millisecond. A thread looks at the disk, which may not
answer. What a worker's children use is read with every fifth sample, and counts for all of these.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.protocol.field_types import MAX_QUANTITY
from ddplaunch.protocol.usage import GpusUsage, NodeUsage, UsageSample, WorkersUsage
from ddplaunch.system.gpus import nvml
from ddplaunch.system.usage_counters import MachineCounters, MachineFiles, OwnCounters, ProcessFiles, TreeCounters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.agent.watches.gpus_of_job import GpusOfJob
    from ddplaunch.agent.workers.worker import Worker

_DISK_EVERY_S = 30.0

Amounts = tuple[float | None, ...]


class UsageSampler:
    """Samples of one attempt. ``close`` closes its files."""

    def __init__(self, workers: Sequence[Worker], gpus: GpusOfJob | None, disk: DiskUse) -> None:
        """``gpus`` are read for the rows that ``gpus.health`` has now."""
        self._workers, self._gpus, self._disk = workers, gpus, disk
        self._rows = [gpu.index for gpu in gpus.health] if gpus else []
        self._files = [ProcessFiles(worker.pid) for worker in workers]
        self._machine = MachineFiles()
        self._at = self._tree_at = time.monotonic()
        disk.percent(self._at)
        self._node = self._machine.read()
        self._own = [files.own() for files in self._files]
        self._trees = self._read_trees(self._own)
        self._lines = [_lines(worker) for worker in workers]

    def close(self) -> None:
        self._machine.close()
        for files in self._files:
            files.close()

    def sample(self, now: float) -> UsageSample:
        """What was used since the last sample, or since the start; without what ``with_children`` adds."""
        span_s = max(now - self._at, 1e-3)
        node, own = self._machine.read(), [files.own() for files in self._files]
        lines = [_lines(worker) for worker in self._workers]
        sample = UsageSample(
            at_s=now,
            span_s=span_s,
            node=_node_usage(self._node, node, self._disk.percent(now), span_s),
            workers=WorkersUsage(
                cpu=tuple(_cpu(new, old, span_s) for new, old in zip(own, self._own, strict=True)),
                rss=tuple(float(found.rss_bytes) if found else None for found in own),
                quiet=tuple(_quiet_s(worker, now) for worker in self._workers),
                lines=tuple(_rate(new, old, span_s) for new, old in zip(lines, self._lines, strict=True)),
            ),
            gpus=self._gpus_usage(),
        )
        self._at, self._node, self._own, self._lines = now, node, own, lines
        return sample

    def with_children(self, samples: Sequence[UsageSample]) -> list[UsageSample]:
        """``samples``, which are all since the last call, with what the children used meanwhile, and bytes of files."""
        span_s = max(self._at - self._tree_at, 1e-3)
        trees = self._read_trees(self._own)
        pairs = list(zip(trees, self._trees, strict=True))
        self._trees, self._tree_at = trees, self._at
        children = [_children_cpu(new, old, span_s) for new, old in pairs]
        read = tuple(_rate(new and new.read_bytes, old and old.read_bytes, span_s) for new, old in pairs)
        written = tuple(_rate(new and new.written_bytes, old and old.written_bytes, span_s) for new, old in pairs)
        return [replace(sample, workers=_with(sample.workers, children, read, written)) for sample in samples]

    def _read_trees(self, own: Sequence[OwnCounters | None]) -> list[TreeCounters | None]:
        return [files.tree(found) if found else None for files, found in zip(self._files, own, strict=True)]

    def _gpus_usage(self) -> GpusUsage | None:
        if not self._gpus or not self._rows:
            return None
        from ddplaunch.system.gpus.gpu_health import GpuUsage  # Only on machines with GPUs.

        found = self._gpus.next_usage()
        gpus = [found.get(index) or GpuUsage(index=index) for index in self._rows]
        return GpusUsage(
            util=tuple(_float(gpu.utilization) for gpu in gpus),
            mem=tuple(_float(gpu.used_bytes) for gpu in gpus),
            power=tuple(_float(None if gpu.power_mw is None else gpu.power_mw / 1000) for gpu in gpus),
            temp=tuple(_float(gpu.temperature_c) for gpu in gpus),
            throttle=tuple(nvml.throttled(gpu.clock_reasons) or None for gpu in gpus),
        )


class DiskUse:
    """How full the file system of a folder is, in percent: a short thread asks every 30 s, if the last has ended."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._percent: float | None = None
        self._due = 0.0
        self._thread: threading.Thread | None = None

    def percent(self, now: float) -> float | None:
        """The newest answer; None without a folder, before the first answer, or if the disk is silent for long."""
        is_silent = self._thread is not None and self._thread.is_alive()
        if self._folder and now >= self._due and not is_silent:
            self._due = now + _DISK_EVERY_S
            self._thread = threading.Thread(target=self._ask, args=(self._folder,), name="disk", daemon=True)
            with contextlib.suppress(RuntimeError):  # The limit of threads.
                self._thread.start()
        return None if is_silent and now >= self._due else self._percent

    def _ask(self, folder: str) -> None:
        percent = None
        with contextlib.suppress(OSError):
            disk = os.statvfs(folder)
            usable = disk.f_blocks - disk.f_bfree + disk.f_bavail  # As df: without what is reserved for root.
            percent = round(100 * (1 - disk.f_bavail / usable), 1) if usable else None
        self._percent = percent


def _with(workers: WorkersUsage, children_cpu: Sequence[float], read: Amounts, written: Amounts) -> WorkersUsage:
    cpu = (None if own is None else own + more for own, more in zip(workers.cpu, children_cpu, strict=True))
    return replace(workers, cpu=tuple(cpu), rd=read, wr=written)


def _node_usage(old: MachineCounters, new: MachineCounters, disk: float | None, span_s: float) -> NodeUsage:
    idle_s = None if new.idle_s is None or old.idle_s is None else new.idle_s - old.idle_s
    busy = None if idle_s is None else 100 * (1 - idle_s / (span_s * (os.cpu_count() or 1)))
    return NodeUsage(
        cpu=None if busy is None else min(max(busy, 0.0), 100.0),
        mem=_float(new.memory_bytes),
        disk=disk,
        rx=_rate(new.received_bytes, old.received_bytes, span_s),
        tx=_rate(new.sent_bytes, old.sent_bytes, span_s),
    )


def _cpu(new: OwnCounters | None, old: OwnCounters | None, span_s: float) -> float | None:
    return max(0.0, 100 * (new.cpu_s - old.cpu_s) / span_s) if new and old else None


def _children_cpu(new: TreeCounters | None, old: TreeCounters | None, span_s: float) -> float:
    return max(0.0, 100 * (new.children_cpu_s - old.children_cpu_s) / span_s) if new and old else 0.0


def _rate(new: float | None, old: float | None, span_s: float) -> float | None:
    return None if new is None or old is None else max(0.0, (new - old) / span_s)


def _float(value: float | None) -> float | None:
    """None also for what a driver may say and a record must not have, as -1 degree."""
    return None if value is None or not 0 <= value <= MAX_QUANTITY else float(value)


def _lines(worker: Worker) -> int | None:
    """None if its output goes to the terminal without us, or the worker has ended."""
    return sum(pump.stream.lines for pump in worker.pumps) if worker.pumps and worker.is_running else None


def _quiet_s(worker: Worker, now: float) -> float | None:
    if not worker.pumps or not worker.is_running:
        return None
    return max(0.0, now - max(worker.started_at, *(pump.stream.written_s for pump in worker.pumps)))
