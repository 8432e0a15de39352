"""Tells each worker of a dry run which GPUs it simulates. Runs in the agent, main thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.agent.parts import Part

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker import Worker


class DryRunPart(Part):
    """The workers of a dry run."""

    def for_worker(self, worker: Worker) -> dict[str, str]:
        """The number of GPUs, and whether ``torch.compile`` compiles for the CPU."""
        gpus = self._node.placement.fake_gpus
        return {"dry_run": f"{gpus.gpus} {int(gpus.compile_on_cpu)}"} if gpus else {}


part = DryRunPart
