"""Finds out what workers do: while they do nothing, before they are stopped, and when the attempt fails.

Runs in the agent, main thread.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.agent.events import AttemptFailure, OutputResumed
from ddplaunch.agent.parts import NEVER, NodeServices, Part
from ddplaunch.features.hangs.activity_watch import ActivityWatch, Routes, WorkersSampled
from ddplaunch.features.hangs.records import AbortHungAttempt, ExamineWorkers, RanksAtFailure

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.hangs.failure_evidence import FailureEvidence
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.results import Round, WorkerExit

_EVENTS = (OutputResumed, WorkersSampled, ExamineWorkers, AbortHungAttempt)


class HangPart(Part):
    """The watch of one attempt after the other."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        self._group: WorkerGroup | None = None
        self._watch: ActivityWatch | None = None
        self._failure_evidence: FailureEvidence | None = None
        self._attempt = 0

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """As ``Part.on_attempt``."""
        node = self._node
        # NCCL's RAS answers for all nodes: one question is enough.
        ask_node = partial(node.placement.ask_node, node.spec.host, asks_nccl=not round_.first_rank)
        routes = Routes(node.report, node.outbox.send, node.post)
        self._group, self._attempt, self._failure_evidence = group, round_.attempt, None
        self._watch = ActivityWatch(node.spec.timeouts, group, node.examiner, ask_node, routes)

    def on_started(self) -> None:
        """As ``Part.on_started``."""
        if self._watch:
            self._watch.begin()

    def on_event(self, event: object) -> bool:
        """As ``Part.on_event``."""
        if self._watch is None or not isinstance(event, _EVENTS):
            return False
        if failure := self._watch.handle_event(event):
            self._node.fail(failure)
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
        watch.end(self._node.wait)
        if self._node.is_stopping():
            watch.examine_before_stop(self._node.wait)
        elif not failure and (group.any_failed or not group.all_ended):
            from ddplaunch.features.hangs.failure_evidence import FailureEvidence  # A job that succeeds does without.

            self._failure_evidence = FailureEvidence(group, self._node.examiner, self._node.post)
            self._failure_evidence.take(self._node.wait)

    def evidence(self, exits: tuple[WorkerExit, ...]) -> tuple[Report, ...]:
        """As ``Part.evidence``: what the workers knew if a collective failed."""
        ranks = self._failure_evidence.of_workers(exits) if self._failure_evidence else ()
        return (RanksAtFailure(self._attempt, ranks),) if ranks else ()


part = HangPart
