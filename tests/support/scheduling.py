"""In which order tests run, and which process of pytest-xdist runs which.

Its own ``--dist loadgroup`` does nothing under pytest 9.2.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_LONG_WAITS = tuple(f"tests/slurm/test_{name}.py" for name in ("hangs", "lost_nodes", "time_limit"))
"""As long as all others of SLURM together."""

_TOGETHER = ("tests/unit/", "tests/process/test_keep_warm.py", "tests/process/test_page_in_browser.py")
"""Files whose tests go to one process: to hand out a unit test costs more than to run it, and others share a keeper or
a browser, which each process would start anew."""


def order(item: pytest.Item) -> int:
    """What takes long goes first, so that at the end no test runs alone; what only computes fills up the rest."""
    if item.nodeid.startswith("tests/slurm/"):
        return 0
    if item.get_closest_marker("slow"):
        return 1
    return 3 if item.nodeid.startswith("tests/unit/") else 2


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Each test goes to whoever is free, in their order; those of SLURM go to two, with a cluster each."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_TOGETHER):
            return nodeid.partition("::")[0]
        if nodeid.startswith("tests/slurm/"):
            return "slurm, long waits" if nodeid.startswith(_LONG_WAITS) else "slurm"
        return nodeid
