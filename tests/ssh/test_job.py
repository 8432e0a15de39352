"""One command starts all nodes over SSH; they run one gloo job, and one verdict comes back."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.nodes import Lab, NodeOptions
from tests.support.runs import PROGRAMS, Finished, Running, start

pytestmark = pytest.mark.ssh

ALLREDUCE, EXIT_WITH = PROGRAMS / "allreduce.py", PROGRAMS / "exit_with.py"


def job(lab: Lab, *arguments: str | Path, hosts: str = "", **options: object) -> Running:
    """A run on the hosts, by default all of the lab, started on the lab's machine for launchers."""
    names = hosts or ",".join(node.name for node in lab.nodes)
    env = {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    given = ("--hosts", names, "--ssh-config", lab.ssh_config, "-x", "DDPLAUNCH_TEST_MARK", "-x", "XDG_STATE_HOME")
    return start(*given, *arguments, under=lab.prefix, env=env, **options)


def exits(finished: Finished, attempt: int = -1) -> list[tuple[int, str, int]]:
    """Rank, host and returncode of all workers of an attempt."""
    return [
        (exit_["rank"], exit_["host"], exit_["returncode"]) for exit_ in finished.report["attempts"][attempt]["exits"]
    ]


def test_two_nodes_run_one_gloo_job_and_recover_from_a_killed_rank(make_lab):
    lab = make_lab(2)
    finished = job(lab, "--nproc-per-node", "2", "--max-restarts", "1", ALLREDUCE, "40", "3:9").finish()
    assert finished.returncode == 0, finished.err
    assert exits(finished) == [(0, "node1", 0), (1, "node1", 0), (2, "node2", 0), (3, "node2", 0)]
    assert "rank 3 on node2: SIGKILL" in finished.err
    assert len(re.findall(r"^\[node[12]:[0-3]\] .*sum 10 in attempt 1", finished.out, re.MULTILINE)) == 4


def test_slots_give_nodes_different_worker_counts(make_lab):
    lab = make_lab(2, node1=NodeOptions(resolves=False), node2=NodeOptions(resolves=False))
    finished = job(lab, ALLREDUCE, "40", hosts="node1:slots=1,node2:slots=3").finish()
    assert finished.returncode == 0, finished.err
    assert [host for _, host, _ in exits(finished)] == ["node1", "node2", "node2", "node2"]
