"""Says where the workers of a node run, and which GPUs are far from that. Runs in the agent, in its main thread."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.text import fold_ints

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.protocol.results import Round


class NumaPart(Part):
    """Tells it once."""

    _was_told = False

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """As ``Part.on_attempt``."""
        spec, placement = self._node.spec, self._node.placement
        was_told, self._was_told = self._was_told, True
        if was_told or spec.dry_run or not placement.visible or spec.workers.numa_binding == "off":
            return
        from ddplaunch.features.numa import cpus

        used = tuple(gpu for rank in range(placement.local_world_size) for gpu in placement.devices_of(rank)[:1])
        bound = "; ".join(dict.fromkeys(placement.bindings))
        if text := f"workers are bound to {bound}" if bound else cpus.kept(os.environ):
            self._node.outbox.send(Notice(f"{spec.host}: {text}", 1))
        if far := cpus.far_gpus(used):
            allowed = fold_ints(os.sched_getaffinity(0))
            text = f"warning: {spec.host}: no CPU near {far} may be used, only CPUs {allowed}"
            self._node.outbox.send(Notice(text))


def part(node: NodeServices) -> NumaPart:
    """The part of an agent."""
    return NumaPart(node)
