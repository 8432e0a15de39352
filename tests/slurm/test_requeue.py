"""--requeue-on: workers have the time to save, and then SLURM, asked once, runs the job again."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path

import pytest

from tests.support.runs import command
from tests.support.slurm import Slurm

pytestmark = pytest.mark.slurm

SAVE = """
import os, pathlib, signal, sys, time
told = []
for signum in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(signum, lambda number, _frame: told.append(number))
print("runs", os.environ["RANK"], flush=True)
if os.environ.get("SLURM_RESTART_COUNT"):
    sys.exit(0)
while not told:
    time.sleep(0.01)
time.sleep(float(os.environ["RANK"]))
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
print("saved", os.environ["RANK"], flush=True)
"""
"""Rank 1 takes a second longer than rank 0."""

REQUEUED = "requeuing SLURM job"


def line(folder: Path, requeue_on: str, *more: str) -> str:
    """Runs it, with logs, and what it saves, in ``folder``."""
    (script := folder / "save.py").write_text(SAVE)
    options = ("--requeue-on", requeue_on, "--log-dir", folder / "logs", "--rdzv-id", "job", "--nproc-per-node", "1")
    return shlex.join(command(*options, *more, script, folder))


@pytest.mark.slow
def test_a_job_that_is_warned_saves_and_is_run_again(slurm: Slurm, tmp_path: Path):
    """As `sbatch --signal=USR1@60` warns of the time limit, but for the wait: SLURM looks at limits every 30 s.

    The code is edited while the job waits, and runs as it was.
    """
    job = slurm.batch(f"exec {line(tmp_path, 'USR1', '--snapshot')}", tmp_path / "log", "-N2")
    job.wait_for("runs", 2)
    slurm.run("scancel", "--signal=USR1", job.id)  # To the agents; the second one changes nothing.
    slurm.run("scancel", "--full", "--signal=USR1", job.id)
    job.wait_for("saved", 2)
    job.wait_in("PENDING")
    (tmp_path / "save.py").write_text("raise SystemExit('edited')")
    assert job.field("Restarts") == "1"
    # Else after two minutes, when the credentials of the first run have expired; in the same second they are revoked.
    job.update("StartTime=now+2")
    job.wait_in("COMPLETED")
    first, second = job.text.split(REQUEUED)
    assert (first.count("runs"), first.count("saved"), first.count("stopping the workers")) == (2, 2, 1)
    assert f"SLURM has requeued this job 1 time ({job.id})" in second
    folders = [tmp_path / "logs" / name for name in ("job", "job.2")]
    for rank, host in enumerate(("node01", "node02")):
        logs = [(folder / host / "attempt_0" / "0" / "stdout.log").read_text() for folder in folders]
        assert logs == [f"runs {rank}\nsaved {rank}\n", f"runs {rank}\n"]
    reports = [json.loads((folder / "report.json").read_text()) for folder in folders]
    assert [(report["slurm_job"]["requeue_count"], report["will_requeue"]) for report in reports] == [
        (0, True),
        (1, False),
    ]


def test_with_a_task_per_node_one_of_them_asks_when_all_have_saved(slurm: Slurm, tmp_path: Path):
    srun = "srun --ntasks-per-node=1 --kill-on-bad-exit=1"
    job = slurm.batch(f"{srun} {line(tmp_path, 'USR1')}", tmp_path / "log", "-N2")
    job.wait_for("runs", 2)
    slurm.run("scancel", "--signal=USR1", job.id)
    job.wait_in("PENDING")
    assert job.field("Restarts") == "1"
    assert job.text.count(REQUEUED) == 1
    reports = [tmp_path / "logs" / "job" / host / "report.json" for host in ("node01", "node02")]
    asked = next(report for report in reports if json.loads(report.read_text())["slurm_job"]["requests_requeue"])
    assert all((tmp_path / rank).stat().st_mtime <= asked.stat().st_mtime for rank in ("0", "1"))
    assert sorted(json.loads(report.read_text())["exit_code"] for report in reports) == [0, 128 + signal.SIGUSR1]


def test_a_job_that_is_cancelled_does_not_come_back(slurm: Slurm, tmp_path: Path):
    """SLURM sends it SIGTERM, as one that is preempted."""
    job = slurm.batch(f"exec {line(tmp_path, 'TERM')}", tmp_path / "log", "-N1")
    job.wait_for("runs")
    slurm.run("scancel", job.id)
    job.wait_for(f"SLURM itself ends job {job.id}, by scancel or to requeue it, so no requeue is requested")
    job.wait_in("CANCELLED")
    assert "saved" in job.text
    assert REQUEUED not in job.text


def test_what_slurm_refuses_is_said(slurm: Slurm, tmp_path: Path):
    job = slurm.batch(f"exec {line(tmp_path, 'USR1')}", tmp_path / "log", "-N1", "--no-requeue")
    job.wait_for("runs")
    assert (
        f"warning: --requeue-on: SLURM would not requeue job {job.id}: allow it by sbatch --requeue, or now" in job.text
    )
    # As `sbatch --signal=B:USR1@60`: the batch script alone.
    slurm.run("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_in("FAILED")
    assert job.field("ExitCode") == f"{128 + signal.SIGUSR1}:0"
    assert f"SLURM did not requeue job {job.id}: Requested operation is presently disabled" in job.text
