"""What is wrong with the GPUs and ports of this node: while a run lasts, between attempts, and for ``--check``.

``GpuFaults`` has the findings of a run, and the faults that explain failures. It runs in the agent, in its main thread;
``HealthPart`` uses it, only on machines with GPUs. ``look`` runs in an agent without workers. Each wait has a limit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.config import NO_LOGS
from ddplaunch.features.gpus.records import Gpu, GpuEvent, GpuReading, GpusRead, IbPort
from ddplaunch.features.health import findings, gpu_events, log_folder, rules
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.system import devices, procfs
from ddplaunch.system.files import run_folder
from ddplaunch.text import quote, size
from ddplaunch.threads import start_work

if TYPE_CHECKING:
    from ddplaunch.agent.parts import NodeServices
    from ddplaunch.agent.rendezvous import Wait
    from ddplaunch.features.gpus.agent import GpusOfJob
    from ddplaunch.features.health.records import NodeHealth
    from ddplaunch.protocol.results import HealthFinding, WorkerExit
    from ddplaunch.protocol.specs import AgentSpec

_WINDOW_S = 60.0
"""A fault of this many seconds before a failure is its cause."""

_FRESH_LIMIT_S = 1.0
_MEMORY_LIMIT_S = 50.0
_MEMORY_TOLERANCE_BYTES = 512 << 20
_MEMORY_ANSWER_S, _MEMORY_PAUSE_S = 2.0, 0.2
_SHOWN_AFTER_S = 3.0
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
        self._before: dict[int, GpuReading] | None = None
        self._missing = ""
        self._faults: list[tuple[float, HealthFinding]] = []
        self._told_at: dict[tuple[str, int | None, str], float] = {}
        self._fresh_by: float | None = None
        self.findings: list[HealthFinding] = []
        self.memory: tuple[GpuReading, ...] | None = None
        self.used_at_start: dict[int, int] = {}
        self.ports: tuple[IbPort, ...] = ()
        self._has_ports = False

    def on_answer(self, answer: GpusRead | GpuEvent) -> None:
        """Judge what the reader has said, which ``gpus`` knows already. What other parts have asked is ignored."""
        if isinstance(answer, GpuEvent):
            if finding := gpu_events.of_event(answer):
                self._found((finding,))
        elif answer.question == "memory":
            known = {gpu.index for gpu in self.gpus.gpus}
            self.memory = tuple(gpu for gpu in answer.gpus if gpu.index in known)
        elif answer.question == "health":
            self._on_health(answer)

    def _on_health(self, answer: GpusRead) -> None:
        before, now = self._before, {gpu.index: gpu for gpu in self.gpus.gpus}
        found = [*_of_readings(before, now), *self._of_ports(answer), *self._of_silence(answer.missing)]
        self._before, self._missing, self._fresh_by = now, answer.missing, None
        if before is None:
            self.used_at_start = {gpu.index: gpu.used_bytes or 0 for gpu in now.values()}
            self.findings = self._of_job(found)
            self._keep_faults(self.findings)
        else:
            self._found(found)

    def _of_ports(self, answer: GpusRead) -> list[HealthFinding]:
        """The ports matter to jobs of several nodes only."""
        if answer.missing or not self._spec.has_peers:
            return []
        before, self.ports = self.ports, answer.ports
        is_first, self._has_ports = not self._has_ports, True
        return list(rules.ports_at_start(self.ports) if is_first else rules.ports_while_running(before, self.ports))

    def _of_silence(self, missing: str) -> list[HealthFinding]:
        is_new = not self._missing and is_worth_telling(missing, has_gpus=self._has_gpus)
        return [gpu_events.of_silence(missing)] if is_new else []

    @property
    def _has_gpus(self) -> bool:
        """Whether this machine has GPUs: images for containers often have NVIDIA's library without one."""
        return devices.has_driver() or bool(self.gpus.placement.devices_of(0))

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
        earliest = time.monotonic() - _WINDOW_S - self._spec.timeouts.shutdown_timeout_s
        return with_hardware(exits, [finding for at, finding in self._faults if at >= earliest])

    def _logged_xids(self) -> Iterable[HealthFinding]:
        """What the kernel's log says, where NVML does not answer any more."""
        known = {(finding.gpu, finding.rule) for _, finding in self._faults}
        for address, number in gpu_events.recent_xids(_WINDOW_S):
            for gpu in self.gpus.gpus:
                found = gpu_events.of_event(GpuEvent(index=gpu.index, uuid=gpu.uuid, kind="xid", xid=number))
                is_its = gpu_events.is_logged_for(address, gpu.pci_address)
                if is_its and found and (found.gpu, found.rule) not in known:
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


def _of_readings(before: Mapping[int, GpuReading] | None, now: Mapping[int, GpuReading]) -> Iterable[HealthFinding]:
    """What is wrong with GPUs, or if an earlier reading is known, what has become wrong since then."""
    if before is None:
        return (finding for gpu in now.values() for finding in rules.at_start(gpu))
    changed = [(before.get(index), gpu) for index, gpu in now.items() if before.get(index) is not gpu]
    return (finding for pair in changed for finding in rules.while_running(*pair))


# Which workers have failed because of a fault.


def with_hardware(exits: Sequence[WorkerExit], faults: Sequence[HealthFinding]) -> tuple[WorkerExit, ...]:
    """``exits`` with the fault of the hardware that has ended each worker; ``faults`` are recent, the first came first.

    A worker that was stopped has failed too if its GPU needs somebody to act: it could not go on, and others waited for
    it.
    """
    return tuple(_blamed(exit_, faults) for exit_ in exits)


def _blamed(exit_: WorkerExit, faults: Sequence[HealthFinding]) -> WorkerExit:
    own = [fault for fault in faults if fault.is_fault and _concerns(fault, exit_)]
    if exit_.stopped:
        own = [fault for fault in own if fault.severity == "refuse" and fault.gpu is not None]
    if not own or exit_.returncode == 0:
        return exit_
    return replace(exit_, hardware=findings.cause(own[0]), stopped=False)


def _concerns(fault: HealthFinding, exit_: WorkerExit) -> bool:
    return fault.gpu is None or exit_.local_rank in fault.local_ranks


# Between attempts: the driver frees the memory of a killed process late, and a worker that starts before would find too
# little. Memory is compared with that before the first attempt: in a container, the processes that NVML names may not
# be the agent's.


def await_free_memory(gpus: GpuFaults, node: NodeServices) -> None:
    """Return when the memory is free, after ``_MEMORY_LIMIT_S``, if NVML does not answer, or if the run must stop."""
    if not gpus.used_at_start:
        return
    host, send = node.spec.host, node.outbox.send
    started = time.monotonic()
    is_shown = False
    while (occupied := _occupied(gpus, node)) and not node.is_stopping():
        waited_s = time.monotonic() - started
        if waited_s >= _MEMORY_LIMIT_S:
            send(Notice(f"after {_MEMORY_LIMIT_S:.0f} s {_in_use(host, occupied)}; the workers start all the same", -1))
            return
        if waited_s >= _SHOWN_AFTER_S and not is_shown:
            is_shown = True
            send(Notice(f"{_in_use(host, occupied)}; the workers start when it is free"))
        node.wait(node.is_stopping, time.monotonic() + _MEMORY_PAUSE_S)


def _occupied(gpus: GpuFaults, node: NodeServices) -> list[GpuReading]:
    """The GPUs with more memory in use than before the first attempt."""
    gpus.ask_memory()
    node.wait(lambda: gpus.memory is not None or node.is_stopping(), time.monotonic() + _MEMORY_ANSWER_S)
    memory, before = gpus.memory, gpus.used_at_start
    if memory is None:
        return []
    return [gpu for gpu in memory if (gpu.used_bytes or 0) > before.get(gpu.index, 0) + _MEMORY_TOLERANCE_BYTES]


def _in_use(host: str, occupied: list[GpuReading]) -> str:
    gpus = ", ".join(f"{size(gpu.used_bytes or 0)} of GPU {gpu.index}{_holders(gpu)}" for gpu in occupied[:8])
    return f"{gpus} on {host} {'are' if len(occupied) > 1 else 'is'} still in use"


def _holders(gpu: GpuReading) -> str:
    named = [f"pid {pid}{_name(pid)}" for pid in gpu.pids[:4]]
    return f" (held by {', '.join(named)})" if named else " (held by a process that cannot be seen from here)"


def _name(pid: int) -> str:
    name = procfs.read(f"/proc/{pid}/comm").strip()
    return f" {quote(os.fsdecode(name))}" if name else ""


# For ``--check``: what a start would find.


def look(read: GpusRead, log_dir: str | None, gpus: tuple[str, ...] | None = None, *, has_peers: bool) -> NodeHealth:
    """The findings about this node, and about all GPUs that workers could use.

    Args:
        read: the health of this machine's GPUs; empty on a machine without any.
        log_dir: value of ``--log-dir``; None: the default folder.
        gpus: value of ``--gpus``; None: those that the environment makes visible.
        has_peers: another node could be used. If not, a job runs without logs if their folder cannot be written.
    """
    usable = _usable(read, gpus)
    found = [*_of_gpus(usable), *_of_folder(_existing(log_dir), has_peers=has_peers)]
    return findings.node_health(found, usable.gpus, usable.ports)


def _usable(read: GpusRead, chosen: tuple[str, ...] | None) -> GpusRead:
    """Without GPUs that no worker may use. If GPUs were chosen that do not exist, with all: a start tells that."""
    try:
        names = devices.visible_devices(os.environ, chosen)
    except ValueError:
        return read
    if names is None:
        return read
    return replace(read, gpus=tuple(gpu for gpu in read.gpus if any(map(gpu.is_named, names))))


def _of_gpus(read: GpusRead) -> list[HealthFinding]:
    found = [finding for gpu in read.gpus for finding in rules.at_start(gpu)]
    found += rules.ports_at_start(read.ports)
    if is_worth_telling(read.missing, has_gpus=devices.has_driver()):
        found.append(gpu_events.of_silence(read.missing))
    return found


def _existing(log_dir: str | None) -> str:
    """The folder for logs, or the one in which it would be created; empty if no logs are kept."""
    if log_dir == NO_LOGS:
        return ""
    folder = Path(log_dir).absolute() if log_dir else run_folder.default_base(os.environ)
    return str(next((path for path in (folder, *folder.parents) if os.path.isdir(path)), folder))


def _of_folder(folder: str, *, has_peers: bool) -> list[HealthFinding]:
    if not folder:
        return []
    silent: tuple[HealthFinding, ...] = (log_folder.silent(folder),)
    probed = start_work("folder probe", lambda: log_folder.look(folder), silent)
    found = probed(time.monotonic() + log_folder.LIMIT_S)
    return [replace(finding, severity="warn") if not has_peers else finding for finding in found]
