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
        compiles = int(self._node.spec.compile_on_cpu)
        return {} if gpus is None else {"dry_run": f"{gpus} {compiles}"}


part = DryRunPart
