"""Ranks draw different random numbers unless the script seeds them, and with a seed nothing depends on the start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import PROGRAMS, environment, run

pytestmark = pytest.mark.torch


def test_every_rank_draws_other_numbers_in_every_attempt(tmp_path: Path) -> None:
    """Forked ranks: nothing of ours touches the seeds of an exec'd one, which is a new interpreter each time."""
    finished = run("--nproc-per-node", "2", "--max-restarts", "1", PROGRAMS / "draw_numbers.py", tmp_path)
    assert finished.returncode == 0, finished.err
    drawn = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("?-?.json"))]
    assert len(drawn) == 4
    for kind in drawn[0]:
        assert len({json.dumps(numbers[kind]) for numbers in drawn}) == len(drawn), f"{kind} repeats"


@pytest.mark.slow
def test_a_seeded_training_has_the_same_losses_however_it_is_started(tmp_path: Path) -> None:
    """Ours are forked, those of torchrun are new interpreters, as with spawn."""
    script, env = PROGRAMS / "train_tiny.py", {"OMP_NUM_THREADS": "1"}
    finished = run("--nproc-per-node", "2", script, tmp_path / "ours", env=env)
    assert finished.returncode == 0, finished.err
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(
        [*torchrun, tmp_path / "torchrun"], env=environment(env), capture_output=True, check=True, timeout=100
    )
    curves = {path.name: path.read_text().split() for path in tmp_path.iterdir() if path.is_file()}
    assert curves["ours"] == curves["torchrun"]
    first, last = (float.fromhex(curves["ours"][step]) for step in (0, -1))
    assert last < first
