"""--keep-warm in a SLURM job: what is left ends with the job, also where SLURM itself does not find it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from ddplaunch.features.warm import keeper_files
from tests.slurm.test_srun import job_of
from tests.support.processes import wait_until
from tests.support.runs import command
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.usefixtures("stub_is_installed")]


def lines(then: str) -> str:
    """Commands of a job: SLURM's nodes are not used, so that the run is a local one."""
    return f"{shlex.join(command('--cluster', 'none', '--keep-warm', '5m', '-m', 'ddplaunch.version'))}; {then}"


def state() -> Path:
    return Path(os.environ["XDG_STATE_HOME"], "ddplaunch")


def wait_for_end() -> None:
    reason = "the session or the scheduler's job that left it has ended"
    files = list(state().glob("warm-*.lock"))
    wait_until(lambda: all(keeper_files.reason(path) == reason for path in files), 15, str(files))
    assert not list(state().glob("warm-*.sock"))


def test_it_ends_with_a_job_of_salloc(slurm: Slurm) -> None:
    """Without --kill-command or a terminal, salloc and its command go on after the end of the job, and so does this."""
    options = ("--quiet", "--job-name=kept", "--kill-command=KILL")
    allocation = slurm.start(["salloc", "-N1", *options, "sh", "-c", lines("sleep 1000")])
    wait_until(lambda: list(state().glob("warm-*.sock")), 60)
    slurm.run("scancel", job_of(slurm, "kept"))
    wait_for_end()
    allocation.finish()


def test_it_ends_with_a_job_of_sbatch(slurm: Slurm, tmp_path: Path) -> None:
    log, go_on = tmp_path / "log", tmp_path / "go_on"
    slurm.batch(lines(f"while [ ! -e {go_on} ]; do sleep 0.1; done"), log, "-N1")
    wait_until(lambda: list(state().glob("warm-*.sock")), 60)
    go_on.touch()
    wait_for_end()
