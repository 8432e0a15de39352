"""--stop-before-end in jobs of a real SLURM: by their limits, by a requeue and by a chain of jobs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.runs import ROOT, command
from tests.support.slurm import Batch, Slurm

pytestmark = pytest.mark.slurm

SAVE = """
import os, pathlib, signal, sys, time
folder, told = pathlib.Path(sys.argv[1]), []
for signum in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(signum, lambda number, _frame: told.append(signal.Signals(number).name))
resumes = len(list(folder.glob("saved*" + os.environ["RANK"])))
print("runs", os.environ["RANK"], "again" * resumes, flush=True)
if resumes:
    sys.exit(0)
while not told:
    time.sleep(0.01)
(folder / ("saved" + os.environ["RANK"])).touch()
print("saved after", *told, flush=True)
"""

LIMIT, STOP = "--time=6", ("--stop-before-end", "USR1@330")
"""30 s after the start of the job, in which its workers start, however busy the machine is, and SLURM is asked."""


def line(folder: Path, *options: str) -> str:
    (script := folder / "save.py").write_text(SAVE)
    settings = ("--log-dir", folder / "logs", "--nproc-per-node", "1", *options)
    return shlex.join(command(*settings, script, folder))


@pytest.mark.slow
def test_a_job_saves_before_its_limit_and_is_run_again(slurm: Slurm, tmp_path: Path):
    """The signal that the workers get is none of --requeue-on."""
    started = line(tmp_path, *STOP, "--requeue-on", "TERM", "--rdzv-id", "job")
    job = slurm.batch(f"exec {started}", tmp_path / "log", "-N2", LIMIT)
    job.wait_for(r"the time limit is 5 min \d+ s away; the workers get SIGUSR1 5 min 30 s before it")
    job.wait_for("saved after SIGUSR1", 2)
    job.wait_in("PENDING")
    assert job.field("Restarts") == "1"
    job.update("StartTime=now+2")
    job.wait_in("COMPLETED")
    assert job.text.count("again") == 2
    assert re.search("the time limit is 5 min (29|30) s away: stopping the workers by SIGUSR1", job.text)
    report = json.loads((tmp_path / "logs" / "job" / "report.json").read_text())
    assert (report["exit_code"], report["will_requeue"], report["outcome"]) == (90, True, "stopped")


@pytest.mark.slow
def test_a_limit_that_is_extended_is_seen(slurm: Slurm, tmp_path: Path):
    job = slurm.batch(f"exec {line(tmp_path, *STOP)}", tmp_path / "log", "-N1", LIMIT)
    job.wait_for("the time limit is 5 min")
    job.update("TimeLimit=7")
    job.wait_for(r"the time limit is now 6 min \d+ s away")
    slurm.run("scancel", job.id)
    job.wait_in("CANCELLED")


@pytest.mark.slow
def test_with_a_launcher_on_each_node_all_stop_together_and_one_requeues(slurm: Slurm, tmp_path: Path):
    started = line(tmp_path, *STOP, "--requeue-on", "USR1", "--rdzv-id", "job")
    srun = "srun --ntasks-per-node=1 --kill-on-bad-exit=1"
    job = slurm.batch(f"{srun} {started}", tmp_path / "log", "-N2", LIMIT)
    job.wait_for("saved after SIGUSR1", 2)
    job.wait_in("PENDING")
    assert job.field("Restarts") == "1"
    assert job.text.count("requeuing SLURM job") == 1
    reports = [json.loads(path.read_text()) for path in (tmp_path / "logs" / "job").glob("*/report.json")]
    assert sorted(report["exit_code"] for report in reports) == [0, 90]
    assert {report["outcome"] for report in reports} == {"stopped"}
    slurm.run("scancel", job.id)


def test_a_job_whose_limit_is_too_short_does_not_start(slurm: Slurm, tmp_path: Path):
    job = slurm.batch(f"exec {line(tmp_path, *STOP)}", tmp_path / "log", "-N1", "--time=5")
    job.wait_in("FAILED")
    assert job.field("ExitCode") == "2:0"
    assert "--stop-before-end USR1@330s: the time limit is " in job.text
    assert "runs" not in job.text


def submit(slurm: Slurm, name: str, folder: Path) -> Batch:
    """Submit a script of scripts/slurm, with a limit that is nearly over when its workers run."""
    text = (ROOT / "scripts" / "slurm" / name).read_text()
    assert "--time=4:00:00" in text
    assert "--stop-before-end 5m" in text
    text = text.replace("--time=4:00:00", LIMIT).replace("--stop-before-end 5m", "--stop-before-end 330")
    (script := folder / name).write_text(text)
    (folder / "save.py").write_text(SAVE)
    log = folder / "log"
    env = {"DDPLAUNCH": " ".join(command("--log-dir", folder / "logs", "--nproc-per-node", "1"))}
    options = ["--parsable", "--chdir", folder, f"--output={log}"]
    done = slurm.start(["sbatch", *options, script, folder / "save.py", folder], env=env).finish()
    assert done.returncode == 0, done.err
    return Batch(slurm, done.out.strip(), log)


@pytest.mark.slow
def test_the_script_that_requeues_itself(slurm: Slurm, tmp_path: Path):
    job = submit(slurm, "requeue.sbatch", tmp_path)
    job.wait_for("saved after SIGTERM", 2)
    job.wait_in("PENDING")
    job.update("StartTime=now+2")
    job.wait_in("COMPLETED")
    assert job.text.count("again") == 2


@pytest.mark.slow
def test_the_script_that_submits_the_next_job_of_a_chain(slurm: Slurm, tmp_path: Path):
    job = submit(slurm, "chain.sbatch", tmp_path)
    job.wait_for("saved after SIGTERM", 2)
    job.wait_for(r"Submitted batch job \d+")
    job.wait_in("FAILED")
    assert job.field("ExitCode") == "90:0"
    following = Batch(slurm, job.text.split("Submitted batch job ")[1].split()[0], tmp_path / "train.log")
    following.wait_for("again", 2)
    following.wait_in("COMPLETED")
