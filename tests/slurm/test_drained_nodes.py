"""Nodes that SLURM drains, or whose maintenance is about to begin, are left at the next attempt and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.test_allocation import salloc
from tests.support.processes import wait_until
from tests.support.runs import TIMEOUT_S, command
from tests.support.slurm import ASK_S, Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

FAIL_ONCE = """
import os, pathlib, sys, time
rank, size, restarts = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
print("runs", rank, size, restarts, flush=True)
go = pathlib.Path(sys.argv[1])
while not go.exists():
    time.sleep(0.02)
sys.exit(1 if rank == "0" and restarts == "0" else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (path := tmp_path / "job.py").write_text(FAIL_ONCE)
    return path


def test_a_drained_node_is_replaced_by_a_spare_after_the_attempt(slurm: Slurm, script: Path, tmp_path: Path):
    """SLURM is asked when the first attempt has started, so the node is drained in the allocation, just before."""
    drain = "scontrol update NodeName=node02 State=DRAIN Reason='bad disk'"
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", script, tmp_path / "go")
    line = " ".join(map(str, command(*options)))
    running = slurm.start(["salloc", "-N3", "sh", "-c", f"{drain}; {line}"], env={"OMP_NUM_THREADS": "1"})
    try:
        running.wait_for("node02: SLURM drains it: bad disk; it leaves after this attempt")
        assert not any("leaves the run: " in text for text in running.error_lines)
        (tmp_path / "go").touch()
        done = running.finish()
        assert done.returncode == 0, done.err
        assert "node02 leaves the run: SLURM drains it: bad disk" in done.err
        assert "node03 replaces node02" in done.err
        assert "[node03:1] runs 1 2 1" in done.out
        assert "[node02:1] runs 1 2 1" not in done.out
        assert "restart 1 of 1" in done.err
        assert len(done.report["attempts"]) == 2
    finally:
        slurm.run("scontrol", "update", "NodeName=node02", "State=RESUME")
        wait_until(lambda: slurm.is_idle, TIMEOUT_S, "", ASK_S)


def test_a_node_before_its_maintenance_leaves_and_one_that_is_needed_stays(slurm: Slurm, script: Path, tmp_path: Path):
    window = "StartTime=now+5minutes Duration=60 Users=root Flags=MAINT,IGNORE_JOBS"
    slurm.run("scontrol", "create", "reservation", "ReservationName=m1", *window.split(), "Nodes=node01,node02")
    try:
        options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "1", script, tmp_path / "go")
        running = salloc(slurm, "-N2 -w node01,node02 --time=3", *options)
        begins = r"(node0\d): its maintenance begins at \d\d:\d\d \(reservation m1\); "
        (leaves,) = running.wait_for(f"{begins}it leaves after")
        (stays,) = running.wait_for(f"{begins}no other node can replace it")
        (tmp_path / "go").touch()
        done = running.finish()
        assert done.returncode == 0, done.err
        assert f"[{stays[1]}:0] runs 0 1 1" in done.out
        assert f"[{leaves[1]}:0] runs 0 2 1" not in done.out
    finally:
        slurm.run("scontrol", "delete", "ReservationName=m1")


def test_where_each_node_has_a_launcher_a_drained_one_takes_part_no_more(slurm: Slurm, script: Path, tmp_path: Path):
    drain = "scontrol update NodeName=node02 State=DRAIN Reason='bad disk'"
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "1", script, tmp_path / "go")
    line = f"srun {' '.join(map(str, command(*options)))}"
    salloc_of_two = ["salloc", "-N2", "-w", "node01,node02", "sh", "-c", f"{drain}; {line}"]
    running = slurm.start(salloc_of_two, env={"OMP_NUM_THREADS": "1"})
    try:
        running.wait_for("node02: SLURM drains it: bad disk; it leaves after this attempt if the others suffice")
        (tmp_path / "go").touch()
        done = running.finish()
        assert done.returncode == 0, done.err
        assert "node02 takes no part: SLURM drains it: bad disk; it waits until the run ends" in done.err
        assert "runs 0 2 0" in done.out
        assert "runs 0 1 1" in done.out
    finally:
        slurm.run("scontrol", "update", "NodeName=node02", "State=RESUME")
        wait_until(lambda: slurm.is_idle, TIMEOUT_S, "", ASK_S)
