"""A job that hangs under a real SLURM, in each way of starting it: one launcher reports for all, and all end alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.hangs import HANG_OPTIONS, assert_reported_once
from tests.support.runs import PROGRAMS, command
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

STARTS = {
    "one-launcher": ("salloc -N2", ("--nproc-per-node", "2"), 1),
    "launcher-per-node": ("srun -N2 --ntasks-per-node=1", ("--nproc-per-node", "2"), 2),
    "launcher-per-worker": ("srun -N2 --ntasks-per-node=2", (), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_a_hang_is_reported_once_and_ended_everywhere(slurm: Slurm, start: str, tmp_path: Path) -> None:
    scheduler, own, launchers = STARTS[start]
    arguments = command(*own, *HANG_OPTIONS, "--log-dir", tmp_path / "logs", PROGRAMS / "hangs.py", "lock")
    done = slurm.start([*scheduler.split(), *arguments], env={"OMP_NUM_THREADS": "1"}).finish()
    assert done.returncode == 87, done.err
    reports = [json.loads(path.read_text()) for path in (tmp_path / "logs").rglob("report.json")]
    assert len(reports) == launchers
    assert_reported_once(done, reports)
