"""Tells each worker of a function where to write what the function returns. Runs in the agent, main thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.agent.parts import Part

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker import Worker


class FunctionPart(Part):
    """Workers that call a function."""

    def for_worker(self, worker: Worker) -> dict[str, str]:
        """The worker's folder; empty if it has none."""
        is_function = self._node.spec.program.entry == "function"
        return {"functions": str(worker.worker_dir or "")} if is_function else {}


part = FunctionPart
