"""Stops this node, and tells its launcher. Runs in the agent, in the main thread."""

from __future__ import annotations

from ddplaunch.agent.parts import Part
from ddplaunch.features.time_limit.records import StopBeforeEnd
from ddplaunch.protocol.launcher_agent import StopWorkers


class TimeLimitPart(Part):
    """One for each agent; only where each node has a launcher it gets orders."""

    def on_event(self, event: object) -> bool:
        """The launcher that watches the job has decided for all nodes.

        The workers get the signal now: by way of this node's launcher it would come later than the order to stop that
        follows when another node has stopped, which is SIGTERM and has the usual grace period.
        """
        if not isinstance(event, StopBeforeEnd):
            return False
        self._node.stop(StopWorkers(event.signum, event.grace_s))
        self._node.outbox.send(event)
        return True


part = TimeLimitPart
