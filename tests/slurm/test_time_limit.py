"""At a time limit SLURM sends SIGTERM twice, at once: the job has all of its time to save."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from tests.support.runs import command
from tests.support.slurm import Batch, Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SAVE_S = 8
"""Longer than the time after a second request to stop, which is 5 s; shorter than SLURM's KillWait."""

LIMIT_S = 60.0
"""SLURM looks at limits every 30 s."""

SAVE = f"""
import os, pathlib, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))
print("runs", os.environ["RANK"], flush=True)
while not told:
    time.sleep(0.01)
while time.monotonic() < told[0] + {SAVE_S}:
    time.sleep(0.1)
pathlib.Path(sys.argv[1], "saved" + os.environ["RANK"]).touch()
"""


def test_a_job_at_its_time_limit_saves(slurm: Slurm, tmp_path: Path):
    """The launcher is a task of a step, of a job's script too, or the script itself."""
    jobs = [start(slurm, tmp_path / name, prefix) for name, prefix in (("step", "srun"), ("script", "exec"))]
    for job in jobs:
        job.wait_for("runs", 2)
        job.update("EndTime=now+5")  # SLURM refuses a second that has passed when the controller reads it.
    for job in jobs:
        wait_until(lambda job=job: job.field("JobState") not in ("RUNNING", "COMPLETING"), LIMIT_S, job.text, 0.5)
        assert job.field("JobState") == "TIMEOUT"
        wait_until(lambda job=job: len(list(job.log.parent.glob("saved*"))) == 2, SAVE_S + LIMIT_S, job.text)
        assert "SIGKILL in 5 s; a third" not in job.text


def start(slurm: Slurm, folder: Path, prefix: str) -> Batch:
    """A job that ``prefix`` starts; what it says and saves goes into ``folder``."""
    folder.mkdir()
    (script := folder / "save.py").write_text(SAVE)
    line = shlex.join(command("--nproc-per-node", "2", "--log-dir", folder / "logs", script, folder))
    return slurm.batch(f"{prefix} {line}", folder / "log", "-N1", "-n1", "--time=5")
