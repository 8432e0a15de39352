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

    def remove_node(self, node: Any) -> str | None:
        """Of a process that died, hand out what it had not begun, and nothing else.

        pytest-xdist 3.8 puts all that the process ever had into the queue again, and the test that ended it, too. A
        process that is given tests that have all been run asks for no others, and the run never ends.
        """
        units = self.assigned_work.pop(node)
        left = [(scope, name) for scope, tests in units.items() for name, is_done in tests.items() if not is_done]
        for scope, name in left[1:]:
            self.workqueue.setdefault(scope, {})[name] = False
        for other in self.assigned_work:
            self._reschedule(other)
        return left[0][1] if left else None

    def _reschedule(self, node: Any) -> None:
        """A process runs a test once it has the next: one that replaces another must be given two."""
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_TOGETHER):
            return nodeid.partition("::")[0]
        if nodeid.startswith("tests/slurm/"):
            return "slurm, long waits" if nodeid.startswith(_LONG_WAITS) else "slurm"
        return nodeid
