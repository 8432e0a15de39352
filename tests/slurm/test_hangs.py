"""A job that hangs under a real SLURM, in each way of starting it: one launcher reports for all, and all end alike."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.support.hangs import HANG_OPTIONS, assert_reported_once
from tests.support.runs import PROGRAMS, command
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

STARTS = {
    "one-launcher": ("salloc -N2", ("--nproc-per-node", "2")),
    "launcher-per-node": ("srun -N2 --ntasks-per-node=1", ("--nproc-per-node", "2")),
    "launcher-per-worker": ("srun -N2 --ntasks-per-node=2", ()),
}

QUIET_S = 12.0
"""A job that is stopped after less silence is not examined."""


@pytest.mark.slow
def test_a_hang_is_reported_once_of_all_launchers_and_ended_everywhere(slurm: Slurm, tmp_path: Path) -> None:
    """One launcher of several nodes: tests/ssh/test_hang_over_ssh.py."""
    scheduler, own = STARTS["launcher-per-worker"]
    arguments = command(*own, *HANG_OPTIONS, "--log-dir", tmp_path / "logs", PROGRAMS / "hangs.py", "lock")
    done = slurm.start([*scheduler.split(), *arguments], env={"OMP_NUM_THREADS": "1"}).finish()
    assert done.returncode == 87, done.err
    reports = [json.loads(path.read_text()) for path in (tmp_path / "logs").rglob("report.json")]
    assert len(reports) == 4
    assert_reported_once(done, reports)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["one-launcher", "launcher-per-node"])
def test_a_signal_of_slurm_shows_where_a_quiet_job_stood(slurm: Slurm, start: str, tmp_path: Path) -> None:
    """As `scancel`, or the end of the time limit: SLURM signals the tasks, which may be agents or launchers.

    It signals the workers as well, on all nodes at once. Those that have ended cannot answer: the report then says so,
    and there is none if they were faster everywhere.
    """
    scheduler, own = STARTS[start]
    options = (*own, "--hang-report", "60", "--shutdown-timeout", "5", "--log-dir", tmp_path / "logs")
    arguments = command(*options, PROGRAMS / "hangs.py", "lock")
    words = [*scheduler.split(), "--job-name", f"quiet-{start}", *arguments]
    running = slurm.start(words, env={"OMP_NUM_THREADS": "1"})
    running.wait_for(r"ready \d", 4)
    time.sleep(QUIET_S)
    slurm.run("scancel", "--signal=TERM", "--name", f"quiet-{start}")
    done = running.finish()
    shown = done.err.count("ddplaunch: when it was stopped")
    assert shown <= 1, done.err
    # If nothing came from node02 in time, both of its ranks may be the cause.
    rank = r"(rank 2|ranks 2-3) (on node\d+ )?(probably )?never joined all_reduce #3 of default_pg \(3 floats\)"
    assert not shown or re.search(rank, done.err), done.err
