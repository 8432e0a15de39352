"""A job that hangs under a real SLURM, in each way of starting it: one launcher reports for all, and all end alike."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.support.hangs import HANG_OPTIONS, assert_reported_once
from tests.support.runs import PROGRAMS, Running, command
from tests.support.slurm import Slurm

pytestmark = pytest.mark.slurm

STARTS = {"one-launcher": "salloc -N2", "launcher-per-node": "srun -N2 --ntasks-per-node=1"}

QUIET_S = 12.0
"""A job that is stopped after less silence is not examined."""


@pytest.mark.slow
@pytest.mark.torch
def test_a_hang_is_reported_once_of_all_launchers_and_ended_everywhere(slurm: Slurm, tmp_path: Path) -> None:
    """One launcher of several nodes: tests/ssh/test_hang_over_ssh.py."""
    arguments = command(*HANG_OPTIONS, "--log-dir", tmp_path / "logs", PROGRAMS / "hangs.py", "lock")
    done = slurm.start(["srun", "-N2", "--ntasks-per-node=2", *arguments], env={"OMP_NUM_THREADS": "1"}).finish()
    assert done.returncode == 87, done.err
    reports = [json.loads(path.read_text()) for path in (tmp_path / "logs").rglob("report.json")]
    assert len(reports) == 4
    assert_reported_once(done, reports)


@pytest.mark.slow
def test_a_signal_of_slurm_shows_where_a_quiet_job_stood(slurm: Slurm, tmp_path: Path) -> None:
    """As `scancel`, or the end of the time limit: SLURM signals the tasks, which may be agents or launchers.

    It signals the workers as well, on all nodes at once. Those that have ended cannot answer: the report then says so,
    and there is none if they were faster everywhere.
    """
    jobs = [begin(slurm, start, tmp_path / start) for start in STARTS]
    for running in jobs:
        running.wait_for("ready", 4)
    time.sleep(QUIET_S)
    for start in STARTS:
        slurm.run("scancel", "--signal=TERM", "--name", f"quiet-{start}")
    for running in jobs:
        done = running.finish()
        shown = done.err.count("ddplaunch: when it was stopped")
        assert shown <= 1, done.err
        where = r"ddplaunch:   ranks? [0-3, -]+(on \S+ )?.*hang.py:\d+ in loop"
        assert not shown or re.search(where, done.err), done.err


def begin(slurm: Slurm, start: str, logs: Path) -> Running:
    options = ("--nproc-per-node", "2", "--hang-report", "60", "--shutdown-timeout", "5", "--log-dir", logs)
    arguments = command(*options, PROGRAMS / "hang.py", "*=loop")
    words = [*STARTS[start].split(), "--job-name", f"quiet-{start}", *arguments]
    return slurm.start(words, env={"OMP_NUM_THREADS": "1"})
