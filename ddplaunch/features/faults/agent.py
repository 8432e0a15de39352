"""Injects the faults of ``--inject`` into the workers of this node. Runs in the agent, main thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.features.faults.records import FaultInjected, InjectFault

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.protocol.results import Round


class FaultPart(Part):
    """Faults of one node."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        self._group: WorkerGroup | None = None

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """As ``Part.on_attempt``."""
        self._group = group

    def on_event(self, event: object) -> bool:
        """Inject a fault into one worker, and report whether the worker still ran."""
        if not isinstance(event, InjectFault) or self._group is None:
            return False
        is_current = event.attempt == self._group.attempt
        happened = is_current and self._group.workers[event.local_rank].inject(event)
        self._node.outbox.send(FaultInjected(event.number, happened))
        return True
