"""SLURM is asked to run a job again: by one launcher of the run, once all workers have ended.

What SLURM does with the question was read in its controller (``job_mgr.c``, 22.05 and 26.11). It requeues batch jobs
only, and none with ``Requeue=0``. A job that it has cancelled or that is over its time it would requeue as well, while
its processes are still being ended.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.job import Job
    from ddplaunch.model import RunResult

_LOOK_S, _ASK_S = 15.0, 60.0


def look(job: Job) -> str:
    """What SLURM would refuse, as a warning before the run, when it can still be changed; empty if nothing.

    Raises:
        LaunchError: there is no ``scontrol``. All nodes look, so that none waits for one that has ended with this.
    """
    if not shutil.which("scontrol"):
        raise LaunchError(
            "--requeue-on: there is no scontrol here, which asks SLURM",
            "Put it in PATH; a container needs SLURM's commands, its configuration and munge's socket too.",
        )
    if not job.asks:
        return ""
    code, told = _scontrol(_LOOK_S, "show", "job", "--oneliner", job.id)
    if code:
        return f"--requeue-on: SLURM does not tell of job {job.id}: {told}"
    if _field(told, "BatchFlag") == "0":
        return f"--requeue-on: SLURM requeues only what sbatch has started, and job {job.id} is something else"
    if _field(told, "Requeue") == "0":
        remedy = f"sbatch --requeue, or now `scontrol update JobId={job.id} Requeue=1`, allows it"
        return f"--requeue-on: SLURM would not requeue job {job.id}: {remedy}"
    return ""


def settle(result: RunResult, say: Callable[[str, int], None]) -> None:
    """Ask once, if this launcher is the one to ask, and tell what came of it; nothing of the run is left by now.

    SLURM then ends what is left of the job by SIGTERM, also this process. A cancelled job is let go: scancel sends
    SIGTERM, as preemption does.
    """
    job = result.job
    if job is None or not (result.requeues and job.asks):
        return
    code, told = _scontrol(_LOOK_S, "show", "job", "--oneliner", job.id)
    if not code and is_cancelled(told):
        say(f"SLURM job {job.id} has been cancelled, so it is not requeued", -1)
        return
    say(f"asking SLURM to requeue job {job.id}", 0)
    code, told = _scontrol(_ASK_S, "requeue", job.id)
    if code:
        say(f"SLURM has not requeued job {job.id}: {told}", -1)


def is_cancelled(told: str) -> bool:
    """From what ``scontrol show job`` tells: its processes are being ended, and neither limit nor preemption did it."""
    state, why, preempted = (_field(told, name) for name in ("JobState", "Reason", "PreemptTime"))
    return state == "CANCELLED" or (state == "COMPLETING" and why == "None" and preempted in ("None", ""))


def _field(told: str, name: str) -> str:
    match = re.search(rf"(?<!\S){name}=(\S*)", told)
    return match[1] if match else ""


def _scontrol(timeout_s: float, *arguments: str) -> tuple[int, str]:
    """Its exit code, and what it printed; of a failure what it complained of."""
    try:
        done = subprocess.run(
            ("scontrol", *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            start_new_session=True,  # The requeued job's end shall not hit it half way.
        )
    except subprocess.TimeoutExpired:
        return 1, f"scontrol has not answered for {timeout_s:g} s"
    except OSError as error:
        return 1, f"scontrol: {error.strerror}"
    said = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
    return done.returncode, (said or f"scontrol ended with {done.returncode}") if done.returncode else done.stdout
