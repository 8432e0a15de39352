"""A rank for which the others wait is named, in a real job over gloo; the samples are taken every second."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import Running, environment, meeting

LAUNCH = """
import sys
from ddplaunch.features.slow_ranks import slow_ranks
from ddplaunch.features.slow_ranks import launcher as watch
watch._FIRST_S, watch._PERIOD_S, watch._PERIOD_PER_COST, slow_ranks.MIN_COLLECTIVES = 1.0, 1.0, 0.0, 100
from ddplaunch.cli.main import main
main()
"""
STEPS = """
import os, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(int(sys.argv[1])):
    time.sleep(0.01 + 0.03 * (rank >= int(sys.argv[2])))
    is_over = torch.tensor(float(rank == 0 and os.path.exists(sys.argv[3])))
    dist.all_reduce(is_over)
    if is_over:
        break
sys.exit(5 if rank == 0 else 0)  # A job that succeeds has no report.txt.
"""


def start(tmp_path: Path, *options: str, steps: int = 200, slow_from: int = 3) -> Running:
    """Start a launcher of two nodes with two workers each; the ranks from ``slow_from`` on are slow.

    The job ends after ``steps``, or when the file ``over`` is there.
    """
    script, logs = tmp_path / "train.py", tmp_path / "logs"
    script.write_text(STEPS)
    own = ("--nnodes", "2", "--nproc-per-node", "2", "--log-dir", str(logs), *options)
    words = [sys.executable, "-c", LAUNCH, *own, str(script), str(steps), str(slow_from), str(tmp_path / "over")]
    pipe = subprocess.PIPE
    return Running(subprocess.Popen(words, env=environment(), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe))


@pytest.mark.torch
@pytest.mark.slow
def test_a_host_of_which_all_ranks_are_late_is_named(tmp_path: Path) -> None:
    running = start(tmp_path, "--dry-run", steps=3000, slow_from=2)
    running.wait_for("ddplaunch: all ranks on node1 come after all others in ")  # Later on a busy machine.
    (tmp_path / "over").touch()
    done = running.finish()
    assert done.returncode == 5, done.err
    found = done.report["collectives"]
    assert {each["host"] for each in found if each["warning"].startswith("all ranks on node1")} == {"node1"}


@pytest.mark.torch
@pytest.mark.slow
def test_the_rank_that_others_wait_for_is_named_by_one_of_two_launchers_that_were_started_by_hand(
    tmp_path: Path,
) -> None:
    by_hand = ("-v", *meeting(), "--rdzv-id", "job")
    launchers = [start(tmp_path, *by_hand, steps=300) for _ in range(2)]
    ended = [launcher.finish() for launcher in launchers]
    errs = "".join(done.err for done in ended)
    assert [done.returncode for done in ended] == [5, 5], errs
    assert len(re.findall(r"ddplaunch: rank 3 on \S+ is last in ", errs)) == 1, errs
    assert len(re.findall(r"rank 3 on \S+ cost the most: last in ", errs)) == 1, errs
    (reporting,) = [done for done in ended if done.report["collectives"]]
    first, *others = reporting.report["collectives"]
    assert (first["rank"], len(others)) == (3, 3)
    assert first["warning"].startswith(f"rank 3 on {first['host']} is last in ")
    assert 0.01 < first["median_s"] < 0.1
    assert first["cost_share"] > 0.2
    assert {each["warning"] for each in others} == {""}
    assert f"\n3     {first['host']}  " in (reporting.run_dir / "report.txt").read_text()
