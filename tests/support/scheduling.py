"""In which order tests run, and which process of pytest-xdist runs which.

Its own ``--dist loadgroup`` does nothing under pytest 9.2.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


def order(item: pytest.Item) -> int:
    """What takes long goes first, so that at the end no test runs alone; what only computes fills up the rest."""
    if item.nodeid.startswith("tests/slurm/"):
        return 0
    if item.get_closest_marker("slow"):
        return 1
    return 3 if item.nodeid.startswith("tests/unit/") else 2


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Each test goes to whoever is free, in their order; all of SLURM go to one, for there is one cluster.

    So do the unit tests of a file: to hand out one costs more than to run it.
    """

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/unit/"):
            return nodeid.partition("::")[0]
        return "slurm" if nodeid.startswith("tests/slurm/") else nodeid
