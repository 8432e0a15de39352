"""What torch.compile and Triton have compiled is kept on a disk of the node for later attempts and runs.

``environ`` sets the variables of the workers, ``folder`` finds and cleans the folder. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


def rows() -> tuple[object, ...]:
    """``--compile-cache``."""
    from typing import get_args

    from ddplaunch.config import CompileCache
    from ddplaunch.rows import REAL_RUN, Option

    return (
        Option(
            "--compile-cache",
            "HOW",
            "Where torch.compile and Triton keep what they have compiled: local, a folder on the node's disk for all "
            "runs; off: as with torchrun. Default: local.",
            choices=get_args(CompileCache),
            sets="workers.compile_cache",
            only=(REAL_RUN,),
            after="--start-method",
        ),
    )


def default_environ(config: LaunchConfig, inherited: Mapping[str, str], workers: int) -> dict[str, str]:
    """The variables that ``environ`` sets; placeholders for what only another machine knows."""
    from ddplaunch.features.compile_cache import environ

    if config.dry_run or config.workers.compile_cache == "off":
        return {}
    if config.is_local:
        return environ.of_machine(inherited, workers)
    return environ.of_other_machine(inherited, workers)
