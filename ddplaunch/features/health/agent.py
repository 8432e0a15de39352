"""The health of this node's hardware: before the first attempt, while workers run, and after a failure.

Runs in the agent, in its main thread. A thread tries the folder of the logs; ``GpuFaults`` judges the GPUs, and is
loaded only on machines that may have some: elsewhere a start must not take longer. Each wait has a limit. In a dry run,
whose GPUs are simulated, nothing is looked at.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, NoReturn

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.errors import HARDWARE, NODE_NOT_READY, LaunchError
from ddplaunch.features.gpus.agent import of_job
from ddplaunch.features.gpus.records import GpuEvent, GpusRead
from ddplaunch.features.health import findings, log_folder
from ddplaunch.features.health.records import HardwareOfNode, NodeHardware, NodeHealth
from ddplaunch.threads import post_from_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.agent.workers.exit_details import AttemptFailure
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.health.gpu_faults import GpuFaults
    from ddplaunch.protocol.results import AttemptResult, HealthFinding, Round, WorkerExit

_FIRST_LIMIT_S = 3.0
"""The reader of the GPUs itself gives up after 2 s; this is only for a thread that does not run."""

_NOTHING_WRONG: tuple[HealthFinding, ...] = ()
_HINTS = {
    HARDWARE: "Use another node; --health warn uses it all the same.",
    NODE_NOT_READY: "Use another node; without --check-first it is used all the same.",
}


class HealthPart(Part):
    """Of one node. Its records go to the ``HealthWatch`` of a launcher, which decides."""

    def __init__(self, node: NodeServices) -> None:
        """Start to try the folder of the logs, unless the user wants nothing looked at or the run is a dry run."""
        super().__init__(node)
        self._spec = spec = node.spec
        self._is_on = spec.health != "off" and not spec.dry_run
        self._must_pass_check = "health" in spec.texts and not spec.dry_run
        self._has_peers = spec.has_peers
        self._is_probed = True
        self._to_tell: NodeHardware | None = None
        self._findings: list[HealthFinding] = []
        self._gpus: GpuFaults | None = None
        if gpus := of_job(node):
            from ddplaunch.features.health.gpu_faults import GpuFaults

            self._gpus = GpuFaults(gpus, spec, node.outbox.send)
        if self._is_on and spec.node_dir:
            self._is_probed = False
            folder = spec.node_dir
            tell = lambda found: node.post(functools.partial(self._on_folder, found))  # noqa: E731
            post_from_thread("folder probe", lambda: log_folder.look(folder), tell, _NOTHING_WRONG)

    # Before the first attempt.

    def may_take_part(self) -> bool:
        """Wait for the first readings, and send them to the launcher."""
        if not self._is_on and not self._must_pass_check:
            return True
        if self._is_on:
            self._await_readings()
        if self._node.is_stopping():
            return True
        report = self._node_health()
        self._node.outbox.send(report)
        if self._spec.each_node_has_launcher:
            self._to_tell = report.hardware
        wrong = findings.refused(report.findings, self._spec.health)
        if wrong and not self._spec.one_launcher_leads:
            self._refuse(wrong)
        return not wrong

    def _refuse(self, wrong: Sequence[HealthFinding]) -> NoReturn:
        line, subject = findings.refusal(wrong, self._spec.host), findings.subject(wrong)
        text = f"logs cannot be written: {line}" if subject == "folder" else f"the hardware is not sound: {line}"
        if subject == "check":
            text = f"the check was not passed: {line}"
        exit_code = NODE_NOT_READY if subject == "check" else HARDWARE
        self._node.rendezvous.tell_cannot_join(text, exit_code)
        raise LaunchError(text, _HINTS[exit_code], exit_code)

    def _await_readings(self) -> None:
        wait, is_stopping = self._node.wait, self._node.is_stopping
        folder_by, gpus_by = time.monotonic() + log_folder.LIMIT_S, time.monotonic() + _FIRST_LIMIT_S
        if faults := self._gpus:
            wait(lambda: faults.gpus.is_read or is_stopping(), lambda: gpus_by)
        if not wait(lambda: self._is_probed or is_stopping(), lambda: folder_by):
            self._on_folder((log_folder.silent(self._spec.node_dir or ""),))

    def _node_health(self) -> NodeHealth:
        faults, found = self._gpus, self._findings
        if faults:
            found = [*found, *faults.findings]
        if self._must_pass_check:
            from ddplaunch.features.health import readiness

            has_gpus = bool(faults and faults.gpus.gpus)
            facts = readiness.facts(has_gpus=has_gpus, same_python=self._spec.same_python)
            found = [*readiness.strict(found), *readiness.broken(facts)]
        return findings.node_health(found, faults.gpus.gpus, faults.ports) if faults else findings.node_health(found)

    # Events.

    def on_event(self, event: object) -> bool:
        """Judge what was read of the GPUs, which is also for other parts."""
        if self._gpus and isinstance(event, (GpusRead, GpuEvent)):
            self._gpus.on_answer(event)
        return False

    def _on_folder(self, findings: tuple[HealthFinding, ...]) -> None:
        """Once. A single node is not refused for its log folder: the job can run without logs, and says so."""
        if not self._is_probed:
            self._is_probed = True
            self._findings += [finding for finding in findings if self._has_peers or finding.severity == "warn"]

    # Attempts.

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """The first time, tell the launcher that watches the job what this node has, if that is another's."""
        super().on_attempt(group, round_)
        hardware, self._to_tell = self._to_tell, None
        if hardware:
            ahead_s = findings.certain_offset(*self._node.rendezvous.clock_ahead_s)
            self._node.report(
                HardwareOfNode(attempt=round_.attempt, host=self._spec.host, hardware=hardware, clock_ahead_s=ahead_s)
            )

    def before_stop(self, failure: AttemptFailure | None) -> None:
        """If a worker has failed, ask for a fresh reading, which ``on_attempt_ended`` awaits."""
        if self._gpus and self._group and self._group.any_failed:
            self._gpus.ask_health()

    def on_attempt_ended(self, exits: tuple[WorkerExit, ...]) -> tuple[WorkerExit, ...]:
        """``exits`` with the faults of the hardware that have ended workers."""
        node = self._node
        return self._gpus.blame(exits, node.wait) if self._gpus and not node.is_stopping() else exits

    def before_next_attempt(self, result: AttemptResult) -> None:
        """Wait until the GPU memory of the workers that have ended is free."""
        if self._gpus:
            from ddplaunch.features.health.gpu_faults import await_free_memory

            await_free_memory(self._gpus, self._node)


part = HealthPart
