"""--check in an allocation: the nodes of SLURM, asked through srun."""

from __future__ import annotations

import re

import pytest

from tests.slurm.test_allocation import salloc
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


def test_the_nodes_of_the_allocation_are_checked(slurm: Slurm):
    done = salloc(slurm, "-N2", "--check").finish()
    assert done.returncode == 0, done.err
    assert re.search(r"^node\[01-02\]  ", done.out, re.MULTILINE)
    assert "all-reduce by gloo over 2 nodes" in done.out
    assert "no problems found" in done.err
    assert "logs on" not in done.err
