"""Tells each worker of a dry run which GPUs it simulates. Runs in the agent, main thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.errors import LaunchError

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker import Worker


class DryRunPart(Part):
    """The workers of a dry run."""

    def __init__(self, node: NodeServices) -> None:
        """Raises a LaunchError if the program cannot be forked or bootstrapped."""
        super().__init__(node)
        plan = node.forkserver.plan
        if node.spec.dry_run and not plan.bootstrap:
            why = plan.reason or "--no-python"
            path = node.spec.program.path
            raise LaunchError(f"--dry-run cannot simulate GPUs in {path}: {why}", "Give a Python script or -m.")

    def for_worker(self, worker: Worker) -> dict[str, str]:
        """The number of GPUs, and whether ``torch.compile`` compiles for the CPU."""
        if not self._node.spec.dry_run:
            return {}
        compiles = int(self._node.spec.compile_on_cpu)
        return {"dry_run": f"{_gpu_count(self._node.placement.visible)} {compiles}"}


def _gpu_count(visible: tuple[str, ...]) -> int:
    """Number of GPUs of a simulated node on which the GPUs ``visible`` exist: an index may exceed their number."""
    return max(len(visible), *(int(name) + 1 for name in visible if name.isdigit()), 0)


part = DryRunPart
