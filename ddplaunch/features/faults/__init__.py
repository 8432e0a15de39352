"""Faults that ``--inject`` makes happen in a dry run: kills, delays, hangs of workers, nodes and connections.

The launcher decides when, the agents act. Must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


def rows() -> tuple[object, ...]:
    """``--inject``."""
    from ddplaunch.rows import DRY_RUN, Option

    def checked(text: str, _option: str) -> str:
        from ddplaunch.features.faults import fault_spec

        fault_spec.parse(text)
        return text

    def grammar(_: object) -> str:
        from ddplaunch.features.faults import fault_spec

        return fault_spec.GRAMMAR

    return (
        Option(
            "--inject",
            "'kill rank=3 after=5s'",
            "With --dry-run: inject a fault and report how the job handled it; 'help' lists the faults.",
            multiple=True,
            prints=grammar,
            sets="injections",
            parse=checked,
            only=(DRY_RUN,),
            heading="Dry run",
        ),
    )


def prepare(config: LaunchConfig, _stdout_fd: int | None) -> LaunchConfig:
    """Before the run: raise UsageError for a fault of no rank, if the number of workers is known; otherwise later."""
    from ddplaunch.features.faults.fault_spec import check, parse

    faults = tuple(map(parse, config.injections))
    nproc = config.workers.nproc_per_node
    if isinstance(nproc, int):
        check(faults, config.max_nodes * nproc, config.max_nodes)
    return config
