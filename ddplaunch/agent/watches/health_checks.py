"""The health of this node's hardware: before the first attempt, while workers run, and after a failure.

Runs in the agent, in its main thread. A thread tries the folder of the logs; ``GpusOfJob`` has the GPUs, and is loaded
only on machines that may have some: elsewhere a start must not take longer. Each wait has a limit. In a dry run, whose
GPUs are simulated, nothing is looked at.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from ddplaunch.agent.events import HealthEvent
from ddplaunch.errors import HARDWARE, LaunchError
from ddplaunch.health import findings
from ddplaunch.protocol.gpus import MAX_GPUS
from ddplaunch.protocol.health import MAX_FINDINGS, MAX_PORTS, NodeHardware, NodeHealth
from ddplaunch.system.files import folder_probe
from ddplaunch.system.files.folder_probe import FolderState
from ddplaunch.system.gpus import devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddplaunch.agent.rendezvous.single_node import Rendezvous
    from ddplaunch.agent.watches.gpus_of_job import GpusOfJob, Wait
    from ddplaunch.agent.workers.placement import Placement
    from ddplaunch.protocol.gpus import GpuReading, IbPort
    from ddplaunch.protocol.health import HealthFinding
    from ddplaunch.protocol.results import WorkerExit
    from ddplaunch.protocol.specs import AgentSpec

FOLDER_LIMIT_S = 2.0
_FIRST_LIMIT_S = 3.0
"""The reader of the GPUs itself gives up after 2 s; this is only for a thread that does not run."""

_REFUSED_HINT = "Use another node; --health warn uses it all the same."


class HealthChecks:
    """Of one node. Its records go to the ``HealthWatch`` of a launcher, which decides."""

    def __init__(self, spec: AgentSpec, send: Callable[[object], None], post: Callable[[object], None]) -> None:
        """Start to read the GPUs and to try the folder, unless the user wants neither or the run is a dry run.

        ``send`` sends a record to the launcher; ``post`` posts an event to the agent, from any thread.
        """
        self._spec, self._send = spec, send
        self._is_on = spec.health != "off" and not spec.fake_gpus
        self._has_peers = bool(spec.launcher_assigns_rendezvous or spec.rendezvous)
        self._gpus: GpusOfJob | None = None
        self._is_probed = True
        self._findings: list[HealthFinding] = []
        if self._is_on:
            self._start(post)

    def _start(self, post: Callable[[object], None]) -> None:
        if devices.has_nvml() or devices.is_amd():
            from ddplaunch.agent.watches.gpus_of_job import GpusOfJob

            self._gpus = GpusOfJob(self._spec, self._send, post)
        if self._spec.node_dir:
            self._is_probed = False
            folder = self._spec.node_dir
            probe = lambda: post(HealthEvent(folder_probe.probe(folder)))  # noqa: E731
            threading.Thread(target=probe, name="folder probe", daemon=True).start()

    # Before the first attempt.

    def check(self, placement: Placement, wait: Wait, is_stopping: Callable[[], bool], rendezvous: Rendezvous) -> bool:
        """Wait for the first readings, and send them to the launcher. Returns whether the node must not be used.

        Args:
            placement: says which GPUs are the job's.
            wait: that of the agent.
            is_stopping: the run is being stopped: there is no need to wait.
            rendezvous: is told what the node has, or that it must not be used.

        Raises:
            LaunchError: it must not be used, and its launcher has no other node.
        """
        if not self._is_on:
            return False
        self._await_readings(placement, wait, is_stopping)
        if is_stopping():
            return False
        report = self._node_health()
        self._send(report)
        rendezvous.describe(report.hardware)
        wrong = [finding for finding in report.findings if finding.severity == "refuse"]
        if not wrong or self._spec.health != "refuse":
            return False
        if not self._spec.launcher_assigns_rendezvous:
            text = f"the hardware is not sound: {findings.refusal(wrong, self._spec.host)}"
            rendezvous.refuse(text)
            raise LaunchError(text, _REFUSED_HINT, HARDWARE)
        return True

    def _await_readings(self, placement: Placement, wait: Wait, is_stopping: Callable[[], bool]) -> None:
        folder_by = time.monotonic() + FOLDER_LIMIT_S
        if gpus := self._gpus:
            gpus.placement = placement
            wait(lambda: gpus.is_read or is_stopping(), time.monotonic() + _FIRST_LIMIT_S)
        if not wait(lambda: self._is_probed or is_stopping(), folder_by):
            self._on_folder((findings.of_silent_folder(self._spec.node_dir or "", FOLDER_LIMIT_S),))

    def _node_health(self) -> NodeHealth:
        gpus = self._gpus
        if gpus is None:
            return node_health(self._findings)
        return node_health([*self._findings, *gpus.findings], gpus.gpus, gpus.ports, gpus.missing)

    # Events.

    def handle_event(self, event: HealthEvent) -> None:
        """Handle what a thread has found out."""
        if isinstance(event.found, FolderState):
            if not self._is_probed:
                self._on_folder(findings.of_folder(event.found))
        elif self._gpus:
            self._gpus.handle_event(event)

    def _on_folder(self, findings: tuple[HealthFinding, ...]) -> None:
        """A single node is not refused for its log folder: the job can run without logs, and says so."""
        self._is_probed = True
        self._findings += [finding for finding in findings if self._has_peers or finding.severity == "warn"]

    # After a failure, and before another attempt.

    def on_workers_ending(self, *, any_failed: bool) -> None:
        """If a worker has failed, ask for a fresh reading, for which ``blame`` waits; workers are stopped meanwhile."""
        if self._gpus and any_failed:
            self._gpus.ask_health()

    def blame(self, exits: tuple[WorkerExit, ...], wait: Wait) -> tuple[WorkerExit, ...]:
        """``exits`` with the faults of the hardware that have ended workers."""
        return self._gpus.blame(exits, wait) if self._gpus else exits

    def await_free_memory(self, wait: Wait, is_stopping: Callable[[], bool]) -> None:
        """Wait until the GPU memory of the workers that have ended is free."""
        if self._gpus:
            from ddplaunch.agent.watches.gpu_memory_wait import await_free_memory

            await_free_memory(self._gpus, self._spec.host, wait, is_stopping, self._send)

    @property
    def gpus(self) -> GpusOfJob | None:
        """The GPUs of the job; None on a machine without GPUs, and where none are looked at."""
        return self._gpus

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that read GPUs, which a sweep of this agent's descendants must leave alone."""
        return self._gpus.pids if self._gpus else ()

    def close(self) -> None:
        """End the process that reads GPUs."""
        if self._gpus:
            self._gpus.close()


def node_health(
    findings: Iterable[HealthFinding], gpus: Iterable[GpuReading] = (), ports: Iterable[IbPort] = (), missing: str = ""
) -> NodeHealth:
    """What is wrong with this node, the worst first, and what its machine has; ``missing`` is as in NodeHealth."""
    ordered = sorted(findings, key=lambda finding: (finding.severity != "refuse", finding.gpu or 0))
    active = [f"{port.link_layer} {port.rate_gbps} Gb/s".strip() for port in ports if port.state == "ACTIVE"]
    hardware = NodeHardware(
        gpus=tuple(gpu.identity() for gpu in gpus)[:MAX_GPUS],
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cpus=len(os.sched_getaffinity(0)),
        ports=tuple(active[:MAX_PORTS]),
    )
    return NodeHealth(findings=tuple(ordered[:MAX_FINDINGS]), hardware=hardware, missing=missing)
