"""docs/snapshots.md: the commands of its guide for a job that queues, as they stand there."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

from tests.support.repositories import repository
from tests.support.runs import ROOT, command
from tests.support.slurm import Batch, Slurm

GUIDE = (ROOT / "docs/snapshots.md").read_text().partition("## A job that queues while you edit\n")[2]
TRAIN = "import os; print('runs', os.environ['RANK'], __file__)"


def test_a_job_that_queues_while_i_edit(slurm: Slurm, tmp_path: Path):
    """Another job has all nodes when this one is submitted."""
    (text,) = re.findall(r"^```\n(.*?)^```", GUIDE.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    project = repository(tmp_path / "project", {"train.py": TRAIN})
    (project / "scripts/slurm").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/slurm/train.sbatch", project / "scripts/slurm")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/ddplaunch"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')
    program.chmod(0o755)
    busy = slurm.batch("sleep 1000", tmp_path / "busy.log", "--nodes=3", "--exclusive")
    busy.wait_in("RUNNING")
    path = f"{program.parent}:{slurm.environ()['PATH']}"
    env = {**slurm.environ(), "PATH": path, "OMP_NUM_THREADS": "1"}
    submitted = slurm.lab.run(["bash", "-ec", text], cwd=project, env=env)
    assert submitted.returncode == 0, submitted.stderr
    job = Batch(slurm, number := submitted.stdout.split()[-1], project / f"train-{number}.log")
    assert job.field("JobState") == "PENDING"
    (project / "train.py").write_text("raise SystemExit('edited')")
    slurm.run("scancel", busy.id)
    job.wait_in("COMPLETED")
    assert len(re.findall(r"runs \d \S+/snapshots/project-\w+/\w+/train.py", job.text)) == 2, job.text
    assert "edited" not in job.text
