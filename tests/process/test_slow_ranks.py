"""A rank for which the others wait is named, in a real job over gloo; the samples are taken every second."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import Running, environment

LAUNCH = """
import sys
from ddplaunch.features.slow_ranks import slow_ranks
from ddplaunch.launcher.watches import slow_ranks_watch as watch
watch._FIRST_S, watch._PERIOD_S, watch._PERIOD_PER_COST, slow_ranks.MIN_COLLECTIVES = 1.0, 1.0, 0.0, 100
from ddplaunch.cli.main import main
main()
"""
STEPS = """
import sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(int(sys.argv[1])):
    time.sleep(0.01 + 0.03 * (rank >= int(sys.argv[3])))
    dist.all_reduce(torch.ones(1))
sys.exit(int(sys.argv[2]) if rank == 0 else 0)
"""


def start(tmp_path: Path, *options: str, steps: int = 200, code: int = 0, slow_from: int = 3) -> Running:
    """Start a launcher of two nodes with two workers each; the ranks from ``slow_from`` on are slow."""
    script, logs = tmp_path / "train.py", tmp_path / "logs"
    script.write_text(STEPS)
    own = ("--nnodes", "2", "--nproc-per-node", "2", "--log-dir", str(logs), *options)
    words = [sys.executable, "-c", LAUNCH, *own, str(script), str(steps), str(code), str(slow_from)]
    pipe = subprocess.PIPE
    return Running(subprocess.Popen(words, env=environment(), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe))


def job(tmp_path: Path, *options: str, **how: int) -> tuple[str, Path]:
    """A dry run. Returns stderr, and the run folder."""
    done = start(tmp_path, "--dry-run", *options, **how).finish()
    assert done.returncode == how.get("code", 0), done.err
    (folder,) = (tmp_path / "logs").iterdir()
    return done.err, folder


@pytest.mark.torch
@pytest.mark.slow
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
@pytest.mark.slow
def test_a_host_of_which_all_ranks_are_late_is_named(tmp_path: Path) -> None:
    err, folder = job(tmp_path, slow_from=2)
    assert "ddplaunch: all ranks on node1 come after all others in " in err
    found = json.loads((folder / "report.json").read_text())["collectives"]
    assert {each["host"] for each in found if each["warning"].startswith("all ranks on node1")} == {"node1"}


@pytest.mark.torch
@pytest.mark.slow
def test_one_of_two_launchers_that_were_started_by_hand_has_the_figures(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    by_hand = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job")
    launchers = [start(tmp_path, *by_hand, steps=300, slow_from=3) for _ in range(2)]
    ended = [launcher.finish() for launcher in launchers]
    errs = [done.err for done in ended]
    assert [done.returncode for done in ended] == [0, 0], errs
    assert len(re.findall(r"rank 3 on \S+ is last in ", "".join(errs))) == 1, errs
    reports = [json.loads(path.read_text())["collectives"] for path in (tmp_path / "logs").rglob("report.json")]
    assert sorted(map(len, reports)) == [0, 4]
    assert max(reports, key=len)[0]["rank"] == 3
