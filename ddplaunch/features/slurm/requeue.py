"""``--requeue-on``: requeues the SLURM job, from one launcher of the run, after the last worker has ended.

Runs in the launcher, before and after the run. From SLURM's controller (``job_mgr.c``, 22.05 and 26.11): it requeues
batch jobs only, and none with ``Requeue=0``. It would also requeue a job that was cancelled or is over its time limit,
while the processes of the job are being ended.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError, Level, OptionError, StartNotice
from ddplaunch.features.slurm import scontrol
from ddplaunch.text import plural

if TYPE_CHECKING:
    from ddplaunch.cluster.scheduled import SlurmJob
    from ddplaunch.config import LaunchConfig
    from ddplaunch.protocol.run_result import RunResult

_SHOW_S, _REQUEUE_S = 15.0, 60.0


_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP")
"""Agents handle these signals too, because SLURM may send them to the steps of a job only."""


def parse_signals(text: str, option: str) -> tuple[str, ...]:
    """Comma-separated signal names, with or without SIG as in sbatch's ``--signal``; empty: none.

    Raises:
        OptionError: another signal.
    """
    words = tuple(word.strip().upper() for word in text.split(",") if word.strip())
    names = tuple(word if word.startswith("SIG") else f"SIG{word}" for word in words)
    for word, name in zip(words, names, strict=True):
        if name not in _SIGNALS:
            known = ", ".join(_short(_SIGNALS))
            raise OptionError(option, text, f"{word} must be one of {known}")
    return names


def _short(names: Sequence[str]) -> list[str]:
    return [name.removeprefix("SIG") for name in names]


def prepare(config: LaunchConfig) -> LaunchConfig:
    """Before the run: ``config`` with what is known of the job, and a warning if SLURM would not requeue it.

    Raises:
        OptionError: a requeue is wanted, and this is no job of SLURM.
        LaunchError: there is no ``scontrol``. Every node checks, so that all nodes fail in this case.
    """
    job, requeue_on = config.slurm_job, config.requeue_on
    if job is None:
        hint = "Leave it out, or start the job with sbatch, and without `--cluster none`."
        raise OptionError("--requeue-on", ",".join(_short(requeue_on)), "this is not a job of SLURM", hint)
    notices = []
    if job.requeue_count and job.requests_requeue:
        times = plural(job.requeue_count, "time")
        notices.append(StartNotice("info", f"SLURM has requeued this job {times} ({job.id})"))
    if requeue_on and not shutil.which("scontrol"):
        raise LaunchError(
            "--requeue-on: the command scontrol is not in PATH",
            "A container needs SLURM's commands, its configuration and munge's socket.",
        )
    job = replace(job, requeue_on=requeue_on)
    if requeue_on and job.requests_requeue and (problem := _problem(job)):
        notices.append(StartNotice("warning", f"--requeue-on: {problem}"))
    signals = (*config.signals, *requeue_on)
    return replace(config, slurm_job=job, signals=signals, notices=(*config.notices, *notices))


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


def is_asked_for(job: SlurmJob | None, signals: Iterable[int]) -> bool:
    """Whether SLURM is to requeue the job after one of these signals."""
    return job is not None and any(signal.Signals(signum).name in job.requeue_on for signum in signals)


def with_job(result: RunResult, job: SlurmJob | None, signals: Iterable[int], *, continues: bool = False) -> RunResult:
    """``result`` of a run in ``job`` that these signals have stopped, with what SLURM does next.

    ``continues``: the run was stopped so that it goes on later: any --requeue-on requeues it.
    """
    is_to_requeue = is_asked_for(job, signals) or bool(continues and job and job.requeue_on)
    requeues = result.outcome == "stopped" and is_to_requeue
    # With `srun --kill-on-bad-exit`, a step that fails would end the one that requeues the job.
    code = 0 if requeues and job and not job.requests_requeue else result.exit_code
    return replace(result, exit_code=code, slurm_job=job, will_requeue=requeues)


def requeue(result: RunResult, show: Callable[[str, int], None]) -> None:
    """After the run: requeue the job if its result requires it and this launcher is the one that requests it.

    SLURM then ends the remaining processes of the job by SIGTERM, this one included. A job that is cancelled is not
    requeued, although scancel sends SIGTERM as preemption does; nor one that SLURM requeues by itself.
    """
    job = result.slurm_job
    if job is None or not (result.will_requeue and job.requests_requeue):
        return
    code, output = scontrol.run(_SHOW_S, "show", "job", "--oneliner", job.id)
    if not code and is_cancelled(output):
        show(f"SLURM itself ends job {job.id}, by scancel or to requeue it, so no requeue is requested", Level.ALWAYS)
        return
    show(f"requeuing SLURM job {job.id}", Level.NORMAL)
    code, output = scontrol.run(_REQUEUE_S, "requeue", job.id)
    if code:
        show(f"SLURM did not requeue job {job.id}: {output}", Level.ALWAYS)


def is_cancelled(output: str) -> bool:
    """Whether ``scontrol show job`` describes a job that is being ended, but not by a limit or by preemption."""
    state, reason, preempted = (scontrol.field(output, name) for name in ("JobState", "Reason", "PreemptTime"))
    return state == "CANCELLED" or (state == "COMPLETING" and reason == "None" and preempted in ("None", ""))
