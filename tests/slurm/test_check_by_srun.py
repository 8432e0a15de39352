"""--check in an allocation: the nodes of SLURM, asked through srun."""

from __future__ import annotations

import re
from pathlib import Path

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


@pytest.mark.slow
def test_a_job_runs_on_the_nodes_that_pass(slurm: Slurm, tmp_path: Path):
    options = ("--nnodes", "1:2", "--check-first", "deep", "--passing-hosts-file", tmp_path / "good")
    few = ("--remote-setup", "case $(hostname) in node02) ulimit -n 2000;; esac")
    done = salloc(slurm, "-N2", *options, *few, "--nproc-per-node", "1", "--no-python", "hostname").finish()
    assert done.returncode == 0, done.err
    assert "not used: node02: at most 2000 open files" in done.err
    assert (tmp_path / "good").read_text() == "node01\n"
    assert done.out.split() == ["[node01:0]", "node01"]
    quick = ("--nnodes", "1:2", "--check-first", "quick", *few)
    done = salloc(slurm, "-N2", *quick, "--nproc-per-node", "1", "--no-python", "hostname").finish()
    assert done.returncode == 0, done.err
    assert "not used: node02: at most 2000 open files" in done.err
    assert "node01 passes the check" in done.err
