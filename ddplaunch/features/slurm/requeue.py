"""``--requeue-on``: requeues the SLURM job, from one launcher of the run, after the last worker has ended.

Runs in the launcher, before and after the run. From SLURM's controller (``job_mgr.c``, 22.05 and 26.11): it requeues
batch jobs only, and none with ``Requeue=0``. It would also requeue a job that was cancelled or is over its time limit,
while the processes of the job are being ended.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError, Level, StartNotice
from ddplaunch.features.slurm import scontrol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.cluster.job import SlurmJob
    from ddplaunch.config import LaunchConfig
    from ddplaunch.protocol.results import RunResult

_SHOW_S, _REQUEUE_S = 15.0, 60.0


def prepare(config: LaunchConfig) -> LaunchConfig:
    """Before the run: ``config`` with a warning if SLURM would not requeue the job.

    Raises:
        LaunchError: there is no ``scontrol``. Every node checks, so that all nodes fail in this case.
    """
    job = config.slurm_job
    if job is None or not job.requeue_on:
        return config
    if not shutil.which("scontrol"):
        raise LaunchError(
            "--requeue-on: the command scontrol is not in PATH",
            "A container needs SLURM's commands, its configuration and munge's socket.",
        )
    problem = _problem(job) if job.requests_requeue else ""
    notices = (StartNotice("warning", f"--requeue-on: {problem}"),) if problem else ()
    return replace(config, notices=(*config.notices, *notices))


def _problem(job: SlurmJob) -> str:
    """Why SLURM would not requeue the job; empty if it would."""
    code, output = scontrol.run(_SHOW_S, "show", "job", "--oneliner", job.id)
    if code:
        return f"SLURM gives no information on job {job.id}: {output}"
    if scontrol.field(output, "BatchFlag") == "0":
        return f"SLURM requeues only jobs of sbatch, and job {job.id} is none"
    if scontrol.field(output, "Requeue") == "0":
        remedy = f"allow it by sbatch --requeue, or now by `scontrol update JobId={job.id} Requeue=1`"
        return f"SLURM would not requeue job {job.id}: {remedy}"
    return ""


def requeue(result: RunResult, show: Callable[[str, int], None]) -> None:
    """After the run: requeue the job if its result requires it and this launcher is the one that requests it.

    SLURM then ends the remaining processes of the job by SIGTERM, this one included. A cancelled job is not requeued,
    although scancel sends SIGTERM as preemption does.
    """
    job = result.slurm_job
    if job is None or not (result.will_requeue and job.requests_requeue):
        return
    code, output = scontrol.run(_SHOW_S, "show", "job", "--oneliner", job.id)
    if not code and is_cancelled(output):
        show(f"SLURM job {job.id} has been cancelled, so it is not requeued", Level.ALWAYS)
        return
    show(f"requeuing SLURM job {job.id}", Level.NORMAL)
    code, output = scontrol.run(_REQUEUE_S, "requeue", job.id)
    if code:
        show(f"SLURM did not requeue job {job.id}: {output}", Level.ALWAYS)


def is_cancelled(output: str) -> bool:
    """Whether ``scontrol show job`` describes a job that is being ended, but not by a limit or by preemption."""
    state, reason, preempted = (scontrol.field(output, name) for name in ("JobState", "Reason", "PreemptTime"))
    return state == "CANCELLED" or (state == "COMPLETING" and reason == "None" and preempted in ("None", ""))
