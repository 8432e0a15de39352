"""What is wrong with the GPUs and ports of this node, while a run lasts: findings, and faults that explain failures.

Runs in the agent, in its main thread; used by ``HealthPart``, only on machines with GPUs. Nothing here blocks but
``wait`` of the agent, with a limit.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.features.health import findings, gpu_events, gpu_rules, kernel_log, port_rules
from ddplaunch.protocol.gpus import Gpu, GpuEvent, GpusRead
from ddplaunch.system.gpus import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddplaunch.agent.events import Wait
    from ddplaunch.agent.gpus_of_job import GpusOfJob
    from ddplaunch.protocol.gpus import GpuReading, HealthFinding, IbPort
    from ddplaunch.protocol.results import WorkerExit
    from ddplaunch.protocol.specs import AgentSpec

_FRESH_LIMIT_S = 1.0
_MAX_FAULTS = 1000
_REPEATED_AFTER_S = 60.0
"""A GPU may tell of the same error many times a second."""

_NO_DRIVER = ("NVML knows no GPU", "NVML: ")
"""Begin of an answer where NVML's library is, and its driver may not be."""


class GpuFaults:
    """The faults of the GPUs of one node.

    Attributes:
        findings: what was wrong at the first reading.
        memory: the job's GPUs in the newest answer about their memory; None after ``ask_memory``, until it is answered.
        used_at_start: bytes of each of the job's GPUs, by index, that were in use before the first attempt.
        ports: the node's ports, as they were read last; none in a job of one node.
    """

    def __init__(self, gpus: GpusOfJob, spec: AgentSpec, send: Callable[[object], None]) -> None:
        """``send`` sends a record to the launcher."""
        self.gpus, self._spec, self._send = gpus, spec, send
        self._has_peers = bool(spec.launcher_assigns_rendezvous or spec.rendezvous)
        self._before: dict[int, GpuReading] | None = None
        self._missing = ""
        self._has_ports = False
        self._faults: list[tuple[float, HealthFinding]] = []
        self._told_at: dict[tuple[str, int | None, str], float] = {}
        self._fresh_by: float | None = None
        self.findings: list[HealthFinding] = []
        self.memory: tuple[GpuReading, ...] | None = None
        self.used_at_start: dict[int, int] = {}
        self.ports: tuple[IbPort, ...] = ()

    def on_answer(self, answer: GpusRead | GpuEvent) -> None:
        """Judge an answer of the reader, which ``gpus`` knows already."""
        if isinstance(answer, GpuEvent):
            if finding := gpu_events.of_event(answer):
                self._found((finding,))
        elif answer.question == "memory":
            known = {gpu.index for gpu in self.gpus.gpus}
            self.memory = tuple(gpu for gpu in answer.gpus if gpu.index in known)
        else:
            self._on_health(answer)

    def _on_health(self, answer: GpusRead) -> None:
        before, was_missing = self._before, self._missing
        gpus = {gpu.index: gpu for gpu in self.gpus.gpus}
        self._before, self._missing, self._fresh_by = gpus, answer.missing, None
        if before is None:
            self.used_at_start = {gpu.index: gpu.used_bytes or 0 for gpu in gpus.values()}
            found = self._of_job(finding for gpu in gpus.values() for finding in gpu_rules.at_start(gpu))
            self.findings += found
            self._keep_faults(found)
        else:
            pairs = [(before.get(index), gpu) for index, gpu in gpus.items()]
            changes = (gpu_rules.while_running(*pair) for pair in pairs if pair[0] is not pair[1])
            self._found(finding for found in changes for finding in found)
        self._on_ports(answer)
        if not was_missing and is_worth_telling(answer.missing, has_gpus=self._has_gpus):
            silence = gpu_events.of_silence(answer.missing)
            self.findings.append(silence)
            if before is not None:
                self._send(silence)

    def _on_ports(self, answer: GpusRead) -> None:
        """The ports matter to jobs of several nodes only."""
        if answer.missing or not self._has_peers:
            return
        if self._has_ports:
            self._found(port_rules.ports_while_running(self.ports, answer.ports))
        else:
            self.findings += port_rules.ports_at_start(answer.ports)
        self._has_ports, self.ports = True, answer.ports

    @property
    def _has_gpus(self) -> bool:
        """Whether this machine has GPUs: images for containers often have NVIDIA's library without one."""
        placement = self.gpus.placement
        return devices.has_driver() or bool(placement and placement.devices_of(0))

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
            ranks = self.gpus.local_ranks(gpu) if gpu else ()
            if ranks or not gpu:
                found.append(replace(finding, local_ranks=ranks))
        return found

    # After a failure.

    def ask_health(self) -> None:
        """Ask for a fresh reading, for which ``blame`` waits."""
        if self.gpus.ask("health"):
            self._fresh_by = time.monotonic() + _FRESH_LIMIT_S

    def blame(self, exits: tuple[WorkerExit, ...], wait: Wait) -> tuple[WorkerExit, ...]:
        """``exits`` with the faults of the hardware that have ended workers."""
        if self._fresh_by is not None:
            wait(lambda: self._fresh_by is None, self._fresh_by)
        if self._fresh_by is not None or self._missing:
            self._found(self._logged_xids())
        self._fresh_by = None
        earliest = time.monotonic() - findings.WINDOW_S - self._spec.timeouts.shutdown_timeout_s
        return findings.with_hardware(exits, [finding for at, finding in self._faults if at >= earliest])

    def _logged_xids(self) -> Iterable[HealthFinding]:
        """What the kernel's log says, where NVML does not answer any more."""
        known = {(finding.gpu, finding.rule) for _, finding in self._faults}
        for address, number in kernel_log.recent_xids(findings.WINDOW_S):
            for gpu in self.gpus.gpus:
                found = gpu_events.of_event(GpuEvent(index=gpu.index, uuid=gpu.uuid, kind="xid", xid=number))
                if kernel_log.is_of(address, gpu.pci_address) and found and (found.gpu, found.rule) not in known:
                    yield found

    # Between attempts.

    def ask_memory(self) -> None:
        """Ask how much memory of the job's GPUs is in use; ``memory`` has the answer later."""
        self.memory = None
        self.gpus.ask("memory")


def _port(finding: HealthFinding) -> str:
    """The port that a finding without a GPU is about, as its text begins with it."""
    return finding.text.partition(": ")[0] if finding.gpu is None else ""


def is_worth_telling(missing: str, *, has_gpus: bool) -> bool:
    """Whether ``missing`` is a reason why GPUs that the node has could not be read."""
    return bool(missing) and (has_gpus or not missing.startswith(_NO_DRIVER))
