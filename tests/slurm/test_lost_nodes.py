"""Nodes of an allocation that SLURM gives up, or that die: the job goes on with the others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.process.test_nodes_meet import WAIT
from tests.slurm.test_allocation import launcher_pid, salloc
from tests.support.processes import wait_until
from tests.support.runs import TIMEOUT_S
from tests.support.slurm import ASK_S, Slurm

pytestmark = pytest.mark.slurm


@pytest.mark.slow
def test_a_node_that_slurm_sets_down_and_one_that_dies_are_left_out(slurm: Slurm, tmp_path: Path):
    (script := tmp_path / "job.py").write_text(WAIT)
    running = salloc(slurm, "-N3 --no-kill", "--nnodes", "1:3", "--nproc-per-node", "1", script)
    running.wait_for("runs . 3", 3)
    try:
        slurm.run("scontrol", "update", "NodeName=node03", "State=DOWN", "Reason=test")
        running.wait_for(r"\[node02:1\] runs 1 2 0")
        slurm.kill_all(slurm.lab["node02"])
        running.wait_for(r"\[node01:0\] runs 0 1 0")
        os.kill(launcher_pid(running), signal.SIGINT)
        assert running.finish().returncode == 130
    finally:
        slurm.start_slurmd(slurm.lab["node02"])
        # ReturnToService=2: node03 comes back by itself.
        wait_until(lambda: slurm.is_idle, TIMEOUT_S, "", ASK_S)
