"""Usage samples of one attempt on this node, and the records of them for the launcher, one every 10 s.

Runs in the agent, in its main thread: a sample takes less than a millisecond. A thread looks at the disk, which may not
answer. What a worker's children use is read with every fifth sample, and counts for all of these. A launcher that does
not read costs no memory: what waits is merged. The samples of an attempt are sent before its result.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ddplaunch.features import mounts
from ddplaunch.features.gpus.records import GpuReading
from ddplaunch.features.usage.records import (
    MAX_SAMPLES,
    PERIOD_S,
    RECORD_S,
    UsageSample,
    UsageSampled,
    UsageStarted,
    mean,
)
from ddplaunch.protocol.field_types import MAX_QUANTITY
from ddplaunch.system import procfs
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    import threading

    from ddplaunch.agent.launcher_channel import Outbox
    from ddplaunch.agent.workers.worker import Worker
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.gpus.agent import GpusOfJob

_PER_RECORD = round(RECORD_S / PERIOD_S)
_DISK_EVERY_S = 30.0

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_OWN_CPU, _ENDED_CPU, _RSS = slice(11, 13), slice(13, 15), 21
"""Positions in /proc/PID/stat: utime and stime; both of the children that were waited for; pages in memory."""

_READ_BYTES = 4096
_MAX_READS = 64
_MAX_CHILDREN = 64
"""Of one worker: each costs some 50 us in a reading."""

Amounts = tuple[float | None, ...]


class UsageRecorder:
    """Records of one attempt on this node."""

    def __init__(self, group: WorkerGroup, at_s: float, outbox: Outbox, gpus: GpusOfJob | None, disk: DiskUse) -> None:
        """Read the counters from which the first sample starts; the workers run since ``at_s``."""
        self._attempt, self._outbox = group.attempt, outbox
        self._sends_means = bool(group.spec.run_dir_name)  # From another machine.
        self._sampler = UsageSampler(group.workers, gpus, disk)
        self._recent: list[UsageSample] = []
        self._waiting: list[UsageSample] = []
        self._per_record = 1
        outbox.send(_started(group, at_s, gpus))

    def sample(self, now: float, *, is_last: bool = False) -> None:
        """Take a sample; send those that make a record. ``is_last``: send it at once, with no mean."""
        self._recent.append(self._sampler.sample(now))
        if is_last or len(self._recent) >= self._per_record:
            self._send(is_last=is_last)
            self._per_record = _PER_RECORD  # The first sample is sent at once, for those who look.

    def end(self) -> None:
        """The attempt has ended: send what is left, with no mean."""
        if self._recent or self._waiting:
            self._send(is_last=True)
        self._sampler.close()

    def _send(self, *, is_last: bool) -> None:
        recent = self._sampler.with_children(self._recent) if self._recent else []
        self._recent = []
        self._waiting += [mean(recent)] if recent and self._sends_means and not is_last else recent
        if self._outbox.send_if_read(UsageSampled(self._attempt, tuple(self._waiting))):
            self._waiting = []
        elif len(self._waiting) > MAX_SAMPLES - _PER_RECORD:
            self._waiting = [mean(self._waiting[at : at + 2]) for at in range(0, len(self._waiting), 2)]


def _started(group: WorkerGroup, at_s: float, gpus: GpusOfJob | None) -> UsageStarted:
    return UsageStarted(
        attempt=group.attempt,
        at_s=at_s,
        ranks=tuple(worker.rank for worker in group.workers),
        gpus=tuple(gpu.identity() for gpu in gpus.gpus) if gpus else (),
        gpu_of_worker=tuple(map(gpus.row_of_worker, range(len(group.workers)))) if gpus else (),
        cpus=os.cpu_count() or 0,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


class UsageSampler:
    """Samples of one attempt. ``close`` closes its files."""

    def __init__(self, workers: Sequence[Worker], gpus: GpusOfJob | None, disk: DiskUse) -> None:
        """``gpus`` are read for the rows that ``gpus.gpus`` has now."""
        self._workers, self._gpus, self._disk = workers, gpus, disk
        self._rows = [gpu.index for gpu in gpus.gpus] if gpus else []
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
        gpus = self._read_gpus()
        values = {
            **_of_node(self._node, node, self._disk.percent(now), span_s),
            "w.cpu": tuple(_cpu(new, old, span_s) for new, old in zip(own, self._own, strict=True)),
            "w.rss": tuple(float(found.rss_bytes) if found else None for found in own),
            "w.quiet": tuple(_quiet_s(worker, now) for worker in self._workers),
            "w.lines": tuple(_rate(new, old, span_s) for new, old in zip(lines, self._lines, strict=True)),
            **_of_gpus(gpus),
        }
        throttle = tuple(gpu.throttled or None for gpu in gpus)
        sample = UsageSample(at_s=now, span_s=span_s, values=values, throttle=throttle)
        self._at, self._node, self._own, self._lines = now, node, own, lines
        return sample

    def with_children(self, samples: Sequence[UsageSample]) -> list[UsageSample]:
        """``samples``, which are all since the last call, with what the children used meanwhile, and bytes of files."""
        span_s = max(self._at - self._tree_at, 1e-3)
        trees = self._read_trees(self._own)
        rates = [
            [_rate(*pair, span_s) for pair in zip(new, old, strict=True)]
            for new, old in zip(trees, self._trees, strict=True)
        ]
        self._trees, self._tree_at = trees, self._at
        children, read, written = zip(*rates, strict=True)
        return [_with(sample, children, {"w.rd": read, "w.wr": written}) for sample in samples]

    def _read_trees(self, own: Sequence[OwnCounters | None]) -> list[TreeCounters]:
        return [files.tree(found) if found else _UNKNOWN for files, found in zip(self._files, own, strict=True)]

    def _read_gpus(self) -> list[GpuReading]:
        if not self._gpus or not self._rows:
            return []
        found = self._gpus.next_usage()
        return [found.get(index) or GpuReading(index=index) for index in self._rows]


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
            with contextlib.suppress(RuntimeError):  # The limit of threads.
                self._thread = in_thread("disk", self._ask)
        return None if is_silent and now >= self._due else self._percent

    def _ask(self) -> None:
        share = mounts.used_share(self._folder or "")
        self._percent = None if share is None else round(100 * share, 1)


def _with(sample: UsageSample, children_cpu: Amounts, more: dict[str, Amounts]) -> UsageSample:
    pairs = zip(sample.values["w.cpu"], children_cpu, strict=True)
    cpu = tuple(None if own is None else own + 100 * (of_children or 0.0) for own, of_children in pairs)
    return replace(sample, values={**sample.values, "w.cpu": cpu, **more})


def _of_gpus(gpus: Sequence[GpuReading]) -> dict[str, Amounts]:
    if not gpus:
        return {}
    return {
        "g.util": tuple(_float(gpu.utilization) for gpu in gpus),
        "g.mem": tuple(_float(gpu.used_bytes) for gpu in gpus),
        "g.power": tuple(gpu.power_w for gpu in gpus),
        "g.temp": tuple(_float(gpu.temperature_c) for gpu in gpus),
    }


def _of_node(old: MachineCounters, new: MachineCounters, disk: float | None, span_s: float) -> dict[str, Amounts]:
    idle_s = None if new.idle_s is None or old.idle_s is None else new.idle_s - old.idle_s
    busy = None if idle_s is None else 100 * (1 - idle_s / (span_s * (os.cpu_count() or 1)))
    return {
        "n.cpu": (None if busy is None else min(max(busy, 0.0), 100.0),),
        "n.mem": (_float(new.memory_bytes),),
        "n.disk": (disk,),
        "n.rx": (_rate(new.received_bytes, old.received_bytes, span_s),),
        "n.tx": (_rate(new.sent_bytes, old.sent_bytes, span_s),),
    }


def _cpu(new: OwnCounters | None, old: OwnCounters | None, span_s: float) -> float | None:
    return max(0.0, 100 * (new.cpu_s - old.cpu_s) / span_s) if new and old else None


def _rate(new: float | None, old: float | None, span_s: float) -> float | None:
    return None if new is None or old is None else max(0.0, (new - old) / span_s)


def _float(value: float | None) -> float | None:
    """None also for what a driver may say and a record must not have, as -1 degree."""
    return None if value is None or not 0 <= value <= MAX_QUANTITY else float(value)


def _lines(worker: Worker) -> int | None:
    """None if its output goes to the terminal without us, or the worker has ended."""
    return sum(stream.lines for stream in worker.streams) if worker.streams and worker.is_running else None


def _quiet_s(worker: Worker, now: float) -> float | None:
    if not worker.streams or not worker.is_running:
        return None
    return max(0.0, now - max(worker.started_at, *(stream.written_s for stream in worker.streams)))


# Counters of processes and of this machine, from files of /proc that stay open: a reading is one system call each. A
# counter that the kernel does not have, or that this user may not read, is None.


class KeptFile:
    """A file that stays open. The descriptor of a process's file stays bound to that process, whatever its pid does."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def read(self) -> bytes:
        """The first 4 kB; empty if the file cannot be read, as that of a process that has ended."""
        try:
            return os.pread(self._fd, _READ_BYTES, 0)
        except OSError:
            return b""

    def read_all(self) -> bytes:
        """As ``read``, for a file that may be longer."""
        parts = [self.read()]
        with contextlib.suppress(OSError):
            while parts[-1] and len(parts) < _MAX_READS:
                parts.append(os.pread(self._fd, _READ_BYTES, sum(map(len, parts))))
        return b"".join(parts)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class OwnCounters(NamedTuple):
    """Of one process: CPU seconds, those of the children that it has waited for, and bytes in memory."""

    cpu_s: float
    ended_cpu_s: float
    rss_bytes: int


TreeCounters = tuple[float | None, int | None, int | None]
"""Of a process with its children: CPU seconds of the children alone, bytes read and written by all."""

_UNKNOWN: TreeCounters = (None, None, None)


class ProcessFiles:
    """The files of one process."""

    def __init__(self, pid: int) -> None:
        self._stat = KeptFile(f"/proc/{pid}/stat")
        self._io = KeptFile(f"/proc/{pid}/io")
        self._children = KeptFile(f"/proc/{pid}/task/{pid}/children")

    def own(self) -> OwnCounters | None:
        """None once the process has ended."""
        return _own(self._stat.read())

    def tree(self, own: OwnCounters) -> TreeCounters:
        """With the children of its main thread: dearer than ``own``, which is the process's."""
        io = procfs.read_and_written(self._io.read())
        cpu_s = own.ended_cpu_s
        for child in self._children.read().split()[:_MAX_CHILDREN]:
            found = _own(procfs.read(f"/proc/{child.decode()}/stat"))
            cpu_s += found.cpu_s + found.ended_cpu_s if found else 0.0
            of_child = procfs.read_and_written(procfs.read(f"/proc/{child.decode()}/io"))
            io = (io[0] + of_child[0], io[1] + of_child[1]) if io and of_child else io
        return (cpu_s, *(io or (None, None)))

    def close(self) -> None:
        for file in (self._stat, self._io, self._children):
            file.close()


def _own(stat: bytes) -> OwnCounters | None:
    fields = stat.rpartition(b")")[2].split()
    if len(fields) <= _RSS or fields[procfs.STATE] in (b"Z", b"X"):
        return None
    own, ended = (sum(map(int, fields[which])) / _TICKS_PER_S for which in (_OWN_CPU, _ENDED_CPU))
    return OwnCounters(own, ended, int(fields[_RSS]) * _PAGE_BYTES)


class MachineCounters(NamedTuple):
    """Of this machine: seconds in which CPUs were idle, in all; bytes of memory in use; bytes over the network.

    Memory in use is what programs cannot get without another losing some.
    """

    idle_s: float | None
    memory_bytes: int | None
    received_bytes: int | None
    sent_bytes: int | None


class MachineFiles:
    """The files of this machine. The network is that of real adapters; in a container, of all but loopback."""

    def __init__(self) -> None:
        # Not /proc/stat, which takes the kernel a millisecond on a machine with hundreds of CPUs.
        self._uptime, self._meminfo = KeptFile("/proc/uptime"), KeptFile("/proc/meminfo")
        self._adapters, self._network = _adapters(), KeptFile("/proc/self/net/dev")

    def read(self) -> MachineCounters:
        uptime = self._uptime.read().split()
        memory = procfs.memory(self._meminfo.read())
        used = memory[0] - memory[1] if memory else None
        received, sent = network_bytes(self._network.read_all(), self._adapters)
        return MachineCounters(float(uptime[1]) if len(uptime) > 1 else None, used, received, sent)

    def close(self) -> None:
        for file in (self._uptime, self._meminfo, self._network):
            file.close()


def _adapters() -> frozenset[bytes]:
    """Names of the network adapters that are hardware."""
    folder = "/sys/class/net"
    with contextlib.suppress(OSError):
        return frozenset(os.fsencode(name) for name in os.listdir(folder) if os.path.exists(f"{folder}/{name}/device"))
    return frozenset()


def network_bytes(net_dev: bytes, adapters: frozenset[bytes]) -> tuple[int | None, int | None]:
    """Bytes received and sent by ``adapters``, or without any by all interfaces but loopback; None: there are none."""
    found = [line.partition(b":") for line in net_dev.splitlines() if b":" in line]
    counted = {name.strip(): rest.split() for name, _, rest in found if name.strip() != b"lo"}
    rows = [row for name, row in counted.items() if len(row) > 8 and (not adapters or name in adapters)]
    return (sum(int(row[0]) for row in rows), sum(int(row[8]) for row in rows)) if rows else (None, None)
