"""A node on which runs die without a known cause is used last by later runs, until it is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.nodes import Lab
from tests.support.runs import run
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh

DIES_ON_NODE1 = """
import os, signal, socket
print("runs on", socket.gethostname(), flush=True)
if socket.gethostname() == "node1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_node_on_which_two_runs_died_is_a_spare_of_the_third(make_lab: Callable[..., Lab], tmp_path: Path):
    lab = make_lab(2)
    (script := tmp_path / "job.py").write_text(DIES_ON_NODE1)
    one_node = ("--nnodes", "1", "--nproc-per-node", "1", script)
    for number in range(2):
        failed = job(lab, *one_node).finish()
        assert (failed.returncode, "runs on node1" in failed.out) == (137, True), failed.err
        assert ("later runs use node1 last, for 7 days" in failed.err) is (number == 1)
    third = job(lab, *one_node).finish()
    assert (third.returncode, "runs on node2" in third.out) == (0, True), third.err
    assert "warning: node1 is used last, after faults in earlier runs (node1: failed in 2 runs without" in third.err
    assert third.err.count("--forget 'node1'") == 1
    assert "used last" in run("--ps", "--nodes").out
    avoiding = job(lab, "--avoid", "node2", *one_node).finish()
    assert avoiding.returncode == 137
    assert "node1 is used although earlier runs had faults there, for lack of other hosts" in avoiding.err
    assert "forgotten: 3 events of node1" in run("--forget", "node1").err
    assert "nothing is known about any node" in run("--ps", "--nodes").err
