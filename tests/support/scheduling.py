"""Which process of pytest-xdist runs which test. Its own ``--dist loadgroup`` does nothing under pytest 9.2."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Each test goes to whoever is free, in the order of collection; those of SLURM stay together, and go first."""

    def _split_scope(self, nodeid: str) -> str:
        # There is one cluster.
        return "slurm" if nodeid.startswith("tests/slurm/") else nodeid
