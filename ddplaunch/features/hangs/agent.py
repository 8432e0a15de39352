"""Finds out what workers do: while they do nothing, before they are stopped, and when the attempt fails.

Runs in the agent, main thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.agent.workers.exit_details import AttemptFailure
from ddplaunch.features.hangs import examiner, node_evidence, stack_dumps
from ddplaunch.features.hangs.activity_watch import ActivityWatch
from ddplaunch.features.hangs.records import AbortHungAttempt, ExamineWorkers, NodeEvidence, WorkersExamined, folded
from ddplaunch.features.hangs.stack_dumps import StackDumps
from ddplaunch.mailbox import NEVER

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker import Worker
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.hangs.evidence import FailureEvidence
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.results import Round, WorkerExit
    from ddplaunch.system.unix_socket import Connection

_EVENTS = (ExamineWorkers, AbortHungAttempt)


class HangPart(Part):
    """The watch of one attempt after the other."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        self._watch: ActivityWatch | None = None
        self._stacks: list[StackDumps] = []
        self._failure_evidence: FailureEvidence | None = None
        self._examiner = examiner.of(node.worker_socket)
        self._ras_address = {} if node.spec.dry_run else node_evidence.own_address(os.environ)

    def default_environ(self) -> Mapping[str, str]:
        """As ``Part.default_environ``: where NCCL's RAS listens."""
        return self._ras_address

    def for_worker(self, worker: Worker) -> dict[str, str]:
        """As ``Part.for_worker``: the file for its stacks, and the socket that it connects to; see ``worker.part``."""
        return {"hangs": f"{self._stacks[worker.local_rank].open()} {self._node.worker_socket.open()}"}

    def on_connection(self, connection: Connection) -> bool:
        """As ``Part.on_connection``: of a worker with a process group, which can be asked from now on."""
        return self._examiner.take(connection)

    def on_worker_exited(self, worker: Worker) -> None:
        """As ``Part.on_worker_exited``."""
        self._examiner.forget(worker.pid)

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """As ``Part.on_attempt``."""
        node = self._node
        ask_node = partial(self._ask_node, asks_nccl=not round_.first_rank)
        super().on_attempt(group, round_)
        self._failure_evidence = None
        self._stacks = [StackDumps(worker) for worker in group.workers]
        self._watch = ActivityWatch(node, group, self._stacks, self._examiner, ask_node)

    def _ask_node(self, limit_s: float, *, asks_nccl: bool) -> NodeEvidence:
        """Ask NCCL and the GPUs. Any thread. NCCL's RAS answers for all nodes: one of them asks it."""
        devices = self._node.placement.devices
        address = {**self._ras_address, **os.environ}.get(node_evidence.RAS_VARIABLE, "")
        names = frozenset(chain.from_iterable(devices)) if devices else None
        return node_evidence.gather(self._node.spec.host, address if asks_nccl else "", names, limit_s)

    def on_started(self) -> None:
        """As ``Part.on_started``."""
        if self._watch:
            self._watch.begin()

    def on_event(self, event: object) -> bool:
        """As ``Part.on_event``."""
        watch = self._watch
        if watch is None or not isinstance(event, _EVENTS):
            return False
        if isinstance(event, ExamineWorkers):
            watch.examine(event)
        elif watch.is_of(event.attempt):
            self._node.fail(AttemptFailure(event.reason, hung=True))
        return True

    def run_due(self, now: float) -> float:
        """As ``Part.run_due``."""
        return self._watch.run_due(now) if self._watch else NEVER

    @property
    def delays_stop(self) -> bool:
        """As ``Part.delays_stop``."""
        return self._watch is not None and self._watch.delays_stop

    def before_stop(self, failure: AttemptFailure | None) -> None:
        """As ``Part.before_stop``."""
        group, watch = self._group, self._watch
        if group is None or watch is None:
            return
        watch.end()
        if failure and failure.hung:
            self._take_last_stacks(group)
        if self._node.is_stopping():
            watch.examine_before_stop(self._node.wait)
        elif not failure and (group.any_failed or not group.all_ended):
            from ddplaunch.features.hangs.evidence import FailureEvidence  # A job that succeeds does without.

            self._failure_evidence = FailureEvidence(group, self._stacks, self._examiner, self._node.post)
            self._failure_evidence.take(self._node.wait)

    def _take_last_stacks(self, group: WorkerGroup) -> None:
        """Wait until workers that hang have written their Python stacks."""
        stack_dumps.request(self._stacks, resume=True)
        end_s = time.monotonic() + stack_dumps.DUMP_S
        self._node.wait(lambda: group.all_ended, lambda: end_s)

    def on_attempt_ended(self, exits: tuple[WorkerExit, ...]) -> tuple[WorkerExit, ...]:
        """As ``Part.on_attempt_ended``: where workers were when their stacks were asked for."""
        for each in self._stacks:
            each.close()
        is_elsewhere = bool(self._node.spec.run_dir_name)
        of_rank = {each.worker.rank: each for each in self._stacks}
        return tuple(of_rank[exit_.rank].added_to(exit_, sends_text=is_elsewhere) for exit_ in exits)

    def evidence(self, exits: tuple[WorkerExit, ...]) -> tuple[Report, ...]:
        """As ``Part.evidence``: what the workers knew if a collective failed."""
        ranks = self._failure_evidence.of_workers(exits) if self._failure_evidence else ()
        return (WorkersExamined(self._group.attempt, 0, folded(ranks)),) if self._group and ranks else ()

    def close(self) -> None:
        """As ``Part.close``."""
        self._examiner.close()


part = HangPart
