"""Deletes old run folders of a node that has its own. Runs in the agent, main thread, before workers start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.features.keep_runs import retention

if TYPE_CHECKING:
    from ddplaunch.protocol.specs import AgentSpec


def begin(spec: AgentSpec, _post: Callable[[object], None]) -> None:
    """Delete old run folders beside that of this run, in the default folder only."""
    if spec.run_dir_name and spec.node_dir and spec.output.log_dir is None:
        retention.prune(Path(spec.node_dir).parents[1], spec.output.keep_runs)
