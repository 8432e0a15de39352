"""What a plan shows of this feature. Runs in the launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.features.hangs import node_evidence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.config import LaunchConfig


def worker_environ(config: LaunchConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """The address of NCCL's RAS, if agents of this machine choose one: others know whether their machine has GPUs."""
    is_chosen = not config.dry_run and config.is_local and node_evidence.own_address(inherited)
    return {node_evidence.RAS_VARIABLE: "127.0.0.1:<a free port>"} if is_chosen else {}
