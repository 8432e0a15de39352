"""One SLURM of node01 to node03 for all tests here; after each, no job may have left anything on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.support import nodes
from tests.support import slurm as cluster
from tests.support.processes import wait_until
from tests.support.slurm import Slurm

_VANISH_S = 10.0


@pytest.fixture(scope="session")
def whole_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = nodes.why_not() or cluster.why_not()
    if reason:
        pytest.skip(reason)
    keys = nodes.Keys(tmp_path_factory.mktemp("keys"))
    with nodes.Lab(tmp_path_factory.mktemp("slurm") / "lab", keys, 3, "node{:02}") as lab, Slurm(lab) as slurm:
        yield slurm


@pytest.fixture
def slurm(whole_slurm: Slurm) -> Iterator[Slurm]:
    yield whole_slurm
    whole_slurm.run("scancel", "--user", "root")
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not whole_slurm.leftovers() and whole_slurm.is_idle, _VANISH_S, "", cluster.ASK_S)
    left = whole_slurm.leftovers()
    if left:
        pytest.fail(f"left running on nodes: {left}")
