"""Reads and checks the faults of a configuration. Runs in the launcher, before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.features.faults import fault_spec

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


def check(config: LaunchConfig) -> None:
    """Raise UsageError for an invalid fault. Its rank is checked if the number of workers is known, else later."""
    faults = tuple(map(fault_spec.parse, config.injections))
    nproc = config.workers.nproc_per_node
    if isinstance(nproc, int):
        fault_spec.check(faults, config.max_nodes * nproc, config.max_nodes)
