"""The GPUs of this node's part of a job: readings, events, faults that explain failures, memory in use.

Runs in the agent, in its main thread; used by ``HealthPart``, only on machines with GPUs. The GPUs are read by
``GpuReader``, whose thread posts its answers. Nothing here blocks but ``wait`` of the agent, with a limit.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.agent.events import HealthEvent
from ddplaunch.agent.gpu_reader import GpuReader
from ddplaunch.features.health import findings, gpu_events, gpu_rules, kernel_log, port_rules
from ddplaunch.protocol.gpus import Gpu, GpuEvent, GpuReading, GpusRead
from ddplaunch.system.gpus import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddplaunch.agent.gpu_reader import Answer
    from ddplaunch.agent.workers.placement import Placement
    from ddplaunch.features.health.records import HealthFinding
    from ddplaunch.protocol.gpus import IbPort, Question
    from ddplaunch.protocol.results import WorkerExit
    from ddplaunch.protocol.specs import AgentSpec

    Wait = Callable[[Callable[[], bool], float], bool]

_FRESH_LIMIT_S = 1.0
_MAX_FAULTS = 1000
_REPEATED_AFTER_S = 60.0
"""A GPU may tell of the same error many times a second."""

_NO_DRIVER = ("NVML knows no GPU", "NVML: ")
"""Begin of an answer where NVML's library is, and its driver may not be."""


class GpusOfJob:
    """The GPUs that the workers of one node may use.

    Attributes:
        placement: says which GPUs those are; to be set before the first event is handled.
        gpus: the job's GPUs, as they were read last.
        is_read: the first answer has come.
        missing: why GPUs cannot be read; empty if they can.
        findings: what was wrong at the first reading.
        memory: the job's GPUs in the newest answer about their memory; None after ``ask_memory``, until it is answered.
        used_at_start: bytes of each of the job's GPUs, by index, that were in use before the first attempt.
    """

    def __init__(self, spec: AgentSpec, send: Callable[[object], None], post: Callable[[object], None]) -> None:
        """Start to read the GPUs. ``send`` and ``post`` are as in ``HealthPart``."""
        self._spec, self._send = spec, send
        self._has_peers = bool(spec.launcher_assigns_rendezvous or spec.rendezvous)
        self._post = post
        self._usage: dict[int, GpuReading] = {}
        self._is_usage_asked = False
        self._reader = GpuReader.start(self._on_answer_in_thread)
        self._gpus: dict[int, GpuReading] = {}
        self._ports: tuple[IbPort, ...] | None = None
        self._faults: list[tuple[float, HealthFinding]] = []
        self._told_at: dict[tuple[str, int | None, str], float] = {}
        self._fresh_by: float | None = None
        self.placement: Placement | None = None
        self.is_read = False
        self.missing = ""
        self.findings: list[HealthFinding] = []
        self.memory: tuple[GpuReading, ...] | None = None
        self.used_at_start: dict[int, int] = {}
        self._ask("health")

    def _ask(self, question: Question) -> None:
        if self._reader:
            self._reader.ask(question)

    @property
    def gpus(self) -> tuple[GpuReading, ...]:
        return tuple(self._gpus.values())

    @property
    def ports(self) -> tuple[IbPort, ...]:
        """The node's ports, as they were read last; none in a job of one node."""
        return self._ports or ()

    def handle_event(self, event: HealthEvent) -> None:
        """Handle an answer of the reader."""
        match event.found:
            case GpusRead() as read:
                self._on_read(read)
            case GpuEvent() as happened if finding := gpu_events.of_event(happened):
                self._found((finding,))

    def _on_answer_in_thread(self, answer: Answer) -> None:
        """Also called in the thread of the reader. Usage is only kept: it must not wake the main thread."""
        if isinstance(answer, GpusRead) and answer.question == "usage":
            self._usage, self._is_usage_asked = {gpu.index: gpu for gpu in answer.gpus}, False
        else:
            self._post(HealthEvent(answer))

    def _on_read(self, read: GpusRead) -> None:
        if read.question == "memory":
            self.memory = tuple(gpu for gpu in read.gpus if gpu.index in self._gpus)
        else:
            self._on_health(read)

    def _on_health(self, answer: GpusRead) -> None:
        read = (_identified(gpu, self._gpus.get(gpu.index)) for gpu in answer.gpus)
        gpus = {gpu.index: gpu for gpu in read if self._local_ranks(gpu)}
        before, was_missing, is_first = self._gpus, self.missing, not self.is_read
        self._gpus, self.missing = gpus or self._gpus, answer.missing
        self.is_read, self._fresh_by = True, None
        if is_first:
            self.used_at_start = {gpu.index: gpu.used_bytes or 0 for gpu in gpus.values()}
            found = self._of_job(finding for gpu in gpus.values() for finding in gpu_rules.at_start(gpu))
            self.findings += found
            self._keep_faults(found)
        else:
            changes = (gpu_rules.while_running(before.get(gpu.index), gpu) for gpu in gpus.values())
            self._found(finding for found in changes for finding in found)
        self._on_ports(answer)
        if not was_missing and is_worth_telling(answer.missing, has_gpus=self._has_gpus):
            silence = gpu_events.of_silence(answer.missing)
            self.findings.append(silence)
            if not is_first:
                self._send(silence)

    def _on_ports(self, answer: GpusRead) -> None:
        """The ports matter to jobs of several nodes only."""
        if answer.missing or not self._has_peers:
            return
        before, self._ports = self._ports, answer.ports
        if before is None:
            self.findings += port_rules.ports_at_start(answer.ports)
        else:
            self._found(port_rules.ports_while_running(before, answer.ports))

    @property
    def _has_gpus(self) -> bool:
        """Whether this machine has GPUs: images for containers often have NVIDIA's library without one."""
        return devices.has_driver() or bool(self.placement and self.placement.devices_of(0))

    def _found(self, findings: Iterable[HealthFinding]) -> None:
        """Findings about the job's GPUs while the run lasts."""
        now = time.monotonic()
        for finding in self._of_job(findings):
            key = (finding.rule, finding.gpu, _port(finding))
            is_new = now - self._told_at.get(key, -_REPEATED_AFTER_S) >= _REPEATED_AFTER_S
            self._keep_faults([finding])
            if is_new:
                self._told_at[key] = now
                self._send(finding)

    def _keep_faults(self, findings: Iterable[HealthFinding]) -> None:
        now = time.monotonic()
        self._faults = [*self._faults[-_MAX_FAULTS:], *((now, finding) for finding in findings if finding.is_fault)]

    def _of_job(self, findings: Iterable[HealthFinding]) -> list[HealthFinding]:
        """The findings about the node and about GPUs of the job, these with the local ranks that use them."""
        found = []
        for finding in findings:
            gpu = None if finding.gpu is None else Gpu(index=finding.gpu, uuid=finding.uuid)
            ranks = self._local_ranks(gpu) if gpu else ()
            if ranks or not gpu:
                found.append(replace(finding, local_ranks=ranks))
        return found

    def _local_ranks(self, gpu: Gpu) -> tuple[int, ...]:
        """Local ranks of the workers that use the GPU."""
        placement, task = self.placement, self._spec.task
        if placement is None:
            return ()
        users = (
            rank for rank in range(placement.local_world_size) if any(map(gpu.is_named, placement.devices_of(rank)))
        )
        return tuple(task.local_rank if task else rank for rank in users)

    # After a failure.

    def ask_health(self) -> None:
        """Ask for a fresh reading, for which ``blame`` waits."""
        if self._reader:
            self._fresh_by = time.monotonic() + _FRESH_LIMIT_S
            self._ask("health")

    def blame(self, exits: tuple[WorkerExit, ...], wait: Wait) -> tuple[WorkerExit, ...]:
        """``exits`` with the faults of the hardware that have ended workers."""
        if self._fresh_by is not None:
            wait(lambda: self._fresh_by is None, self._fresh_by)
        if self._fresh_by is not None or self.missing:
            self._found(self._logged_xids())
        self._fresh_by = None
        earliest = time.monotonic() - findings.WINDOW_S - self._spec.timeouts.shutdown_timeout_s
        return findings.with_hardware(exits, [finding for at, finding in self._faults if at >= earliest])

    def _logged_xids(self) -> Iterable[HealthFinding]:
        """What the kernel's log says, where NVML does not answer any more."""
        known = {(finding.gpu, finding.rule) for _, finding in self._faults}
        for address, number in kernel_log.recent_xids(findings.WINDOW_S):
            for gpu in self._gpus.values():
                found = gpu_events.of_event(GpuEvent(index=gpu.index, uuid=gpu.uuid, kind="xid", xid=number))
                if kernel_log.is_of(address, gpu.pci_address) and found and (found.gpu, found.rule) not in known:
                    yield found

    # Between attempts.

    def ask_memory(self) -> None:
        """Ask how much memory of the job's GPUs is in use; ``memory`` has the answer later."""
        self.memory = None
        self._ask("memory")

    # Usage.

    def row_of_worker(self, local_rank: int) -> int | None:
        """Position in ``gpus`` of the GPU that a worker probably uses; of several, the first."""
        if self.placement is None:
            return None
        of_each = [self.placement.devices_of(rank) for rank in range(self.placement.local_world_size)]
        names = of_each[local_rank]
        if len(of_each) > 1 and len(set(of_each)) == 1:  # All workers see all GPUs.
            names = names[local_rank : local_rank + 1]
        found = (row for row, gpu in enumerate(self.gpus) if names and gpu.is_named(names[0]))
        return next(found, None)

    def next_usage(self) -> dict[int, GpuReading]:
        """What the GPUs did at the last call, by index, and ask again. Empty while the driver does not answer."""
        if self._is_usage_asked:  # The last question still waits.
            return {}
        if self._reader:
            self._is_usage_asked = True
            self._ask("usage")
        return self._usage

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the reader, which a sweep of this agent's descendants must leave alone."""
        return (self._reader.pid,) if self._reader else ()

    def close(self) -> None:
        """End the reader's process."""
        if self._reader:
            self._reader.close()


def _port(finding: HealthFinding) -> str:
    """The port that a finding without a GPU is about, as its text begins with it."""
    return finding.text.partition(": ")[0] if finding.gpu is None else ""


def is_worth_telling(missing: str, *, has_gpus: bool) -> bool:
    """Whether ``missing`` is a reason why GPUs that the node has could not be read."""
    return bool(missing) and (has_gpus or not missing.startswith(_NO_DRIVER))


def _identified(gpu: GpuReading, before: GpuReading | None) -> GpuReading:
    """``gpu``, with what identifies it as in an earlier reading: of a GPU that is lost, NVML tells only the index."""
    if before is None or gpu.uuid:
        return gpu
    return replace(gpu, uuid=before.uuid, name=before.name, pci_address=before.pci_address)
