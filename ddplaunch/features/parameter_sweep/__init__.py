"""Many jobs on one machine, a line of arguments for each: ``--sweep FILE``.

Each job is a run of its own, with a launcher that is a fork of this process. ``job_lines`` reads FILE, ``places`` says
how many jobs run at a time and on which GPUs, ``run_jobs`` runs them, and ``results`` has what is shown and written of
them. Must not import torch. The word sweep alone means the search for processes that are left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import OptionError, StartNotice, UsageError

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

_HEADING = "Many jobs"


def rows() -> tuple[object, ...]:
    """``--sweep``, ``--jobs``, ``--retry-failed``, ``--stop-on-failure``."""
    from ddplaunch.rows import Condition, Option, flag, parse_count

    sweep = (Condition("with --sweep", lambda config: config.sweep is not None or config.sweep_jobs),)
    return (
        Option(
            "--sweep",
            "FILE",
            "Run many jobs: each line has further arguments of the script; {a,b} and 1..4 stand for several lines. "
            "- reads the lines from stdin. As many jobs run at a time as the GPUs suffice for, or else the CPUs.",
            sets="sweep",
            completes="file",
            heading=_HEADING,
        ),
        Option(
            "--jobs",
            "N",
            "With --sweep: run N jobs at a time; if they need more GPUs than there are, they share them.",
            sets="jobs",
            parse=parse_count,
            only=sweep,
            heading=_HEADING,
        ),
        flag(
            "--retry-failed",
            "With --sweep: leave out the jobs that have succeeded when this FILE and script were run last.",
            sets="retry_failed",
            only=sweep,
            heading=_HEADING,
        ),
        flag(
            "--stop-on-failure",
            "With --sweep: if a job fails, stop the others and start no more.",
            sets="stop_on_failure",
            only=sweep,
            heading=_HEADING,
        ),
    )


def prepare(config: LaunchConfig, _stdout_fd: int | None) -> LaunchConfig:
    """Before the jobs: read them.

    Raises:
        UsageError: a line is not valid, or jobs cannot be run so.
    """
    from ddplaunch.features.parameter_sweep.job_lines import read

    _check(config)
    if config.retry_failed:
        from ddplaunch.features.parameter_sweep import results

        results.earlier(config)
    return replace(config, sweep_jobs=read(config.sweep)) if config.sweep else config


def planned(config: LaunchConfig) -> LaunchConfig:
    """What --plan shows: the plan is that of the first job."""
    from ddplaunch.features.parameter_sweep import job_lines, places

    config = prepare(config, None)
    found = places.of_jobs(config)
    head = f"{len(config.sweep_jobs)} jobs of --sweep, {len(found)} at a time; this is the plan of the first one"
    lines = (head, *(f"job {number}: {job_lines.text(job)}" for number, job in enumerate(config.sweep_jobs, 1)))
    first = places.of_job(config, config.sweep_jobs[0], found[0])
    return replace(first, notices=(*first.notices, *(StartNotice("info", line) for line in lines)))


def _check(config: LaunchConfig) -> None:
    """Raise UsageError if several jobs of this configuration would be in each other's way, or are on other machines."""
    if config.jobs == 0:
        raise OptionError("--jobs", 0, "must be above 0")
    if config.hosts or config.each_node_has_launcher or config.task:
        raise UsageError(
            "--sweep runs jobs of one machine",
            "On a cluster, its scheduler runs many jobs; in a SLURM job of one node, start ddplaunch without srun.",
        )
    refused = {
        "--log-dir /dev/null": not config.output.keeps_files,
        "--metrics-file": config.output.metrics_file,
        "--debug-on-error": config.workers.debug_on_error,
        "--master-port": config.master_port,
        "the script -": config.text and config.sweep == "-",
    }
    for given in (name for name, is_given in refused.items() if is_given):
        raise UsageError(f"--sweep cannot be combined with {given}", "Each job needs its own.")
