"""Launchers that a scheduler starts, once per node: they find each other by its variables alone.

Once per worker: tests/slurm/test_srun.py.
"""

from __future__ import annotations

import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ddplaunch.features.schedulers.info import candidate_ports
from tests.process.test_nodes_meet import SUM, WAIT, sums
from tests.support.runs import Running, start

NODES = "localhost,elsewhere"


@pytest.fixture
def job_id() -> str:
    """No other test meets at the same ports."""
    return str(secrets.randbelow(10**9))


def task(
    job_id: str,
    script: Path,
    rank: int,
    *options: str,
    env: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> Running:
    """The task of one of the two nodes of a step."""
    variables = {
        "SLURM_JOB_ID": job_id,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": NODES,
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": str(rank),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": NODES.split(",")[rank],
    }
    return start(*options, script, *arguments, env={"OMP_NUM_THREADS": "1", **variables, **(env or {})})


def test_ports_of_other_runs_are_passed_over(job_id: str, script: Path):
    script.write_text(SUM)
    silent, taken, *_ = candidate_ports(f"slurm-{job_id}.0.0")
    endpoint = ("--rdzv-backend", "c10d", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint")
    other = start(*endpoint, f"localhost:{taken}", script)
    other.wait_for("waiting at")
    with socket.create_server(("127.0.0.1", silent)):
        nodes = [task(job_id, script, rank, "--nproc-per-node", "1") for rank in (1, 0)]
        finished = [each.finish() for each in nodes]
    assert [done.returncode for done in finished] == [0, 0], finished[0].err
    assert [line.split()[0] for line in sums(finished)] == ["2", "2"]
    other.signal(signal.SIGINT)
    assert other.finish().returncode == 130


def test_a_node_that_comes_first_waits_for_the_one_that_serves(job_id: str, script: Path):
    script.write_text(WAIT)
    early = task(job_id, script, 1, "-v", "--nproc-per-node", "1", "--rdzv-conf", "join_timeout=1")
    done = early.finish()
    assert done.returncode == 83
    port, *others = candidate_ports(f"slurm-{job_id}.0.0")
    assert f"localhost:{port} (or port {others[0]}, " in done.err


def test_a_job_that_nobody_can_requeue_is_not_started(script: Path, tmp_path: Path):
    script.write_text(WAIT)
    done = start("--requeue-on", "USR1", script, env={"SLURM_JOB_ID": "7", "PATH": str(tmp_path)}).finish()
    assert done.returncode == 82
    assert "the command scontrol is not in PATH" in done.err


def test_an_allocation_without_srun_is_an_error_never_a_local_run(script: Path, tmp_path: Path):
    script.write_text(WAIT)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b", "PATH": str(tmp_path)}
    done = start(script, env=job).finish()
    assert done.returncode == 82
    assert "srun cannot be run here" in done.err
    assert "--cluster none" in done.err
