"""A rank for which the others wait is named, in a real job over gloo; the samples are taken every second."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import runs

LAUNCH = """
import sys
from ddplaunch.launcher import slow_ranks_watch as watch
watch._FIRST_S, watch._PERIOD_S, watch._PERIOD_PER_COST, watch.slow_ranks.MIN_COLLECTIVES = 1.0, 1.0, 0.0, 100
from ddplaunch.cli.main import main
main()
"""
STEPS = """
import sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(int(sys.argv[1])):
    time.sleep(0.01 + 0.03 * (rank == 3))
    dist.all_reduce(torch.ones(1))
sys.exit(int(sys.argv[2]) if rank == 0 else 0)
"""


def job(tmp_path: Path, *options: str, steps: int = 200, code: int = 0) -> tuple[str, Path]:
    """Run four ranks on two simulated nodes. Returns stderr, and the run folder."""
    script, logs = tmp_path / "train.py", tmp_path / "logs"
    script.write_text(STEPS)
    own = ("--dry-run", "--nnodes", "2", "--nproc-per-node", "2", "--log-dir", str(logs), *options)
    done = runs.python("-c", LAUNCH, *own, script, str(steps), str(code))
    assert done.returncode == code, done.err
    (folder,) = logs.iterdir()
    return done.err, folder


@pytest.mark.torch
def test_the_rank_that_others_wait_for_is_named(tmp_path: Path) -> None:
    err, folder = job(tmp_path, "-v", code=5)
    assert "ddplaunch: rank 3 on node1 is last in " in err
    assert "rank 3 on node1 cost the most: last in " in err
    first, *others = json.loads((folder / "report.json").read_text())["collectives"]
    assert (first["rank"], first["host"]) == (3, "node1")
    assert first["warning"].startswith("rank 3 on node1 is last in ")
    assert 0.01 < first["median_s"] < 0.1
    assert first["cost_share"] > 0.2
    assert {each["warning"] for each in others} == {""}
    assert "\n3     node1  " in (folder / "report.txt").read_text()


@pytest.mark.torch
def test_off(tmp_path: Path) -> None:
    err, folder = job(tmp_path, "--hang-report", "off", steps=60)
    assert "is last in" not in err
    assert json.loads((folder / "report.json").read_text())["collectives"] == []
