"""How many jobs run at a time, and which GPUs each of them gets. Pure but for a look at this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import UsageError
from ddplaunch.system import devices
from ddplaunch.text import free_gpus, plural

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.parameter_sweep.job_lines import Job

_WAIT_S = 7 * 86400.0
"""With --gpus free, a job waits so long for GPUs that others use, unless the user has said how long."""

Gpus = tuple[str, ...] | None
"""As ``WorkerConfig.gpus``: of a job on a machine without GPUs None."""


def of_jobs(config: LaunchConfig) -> list[Gpus]:
    """The GPUs of each job that runs at a time: with the GPUs that the user has named, or all that are visible.

    Raises:
        UsageError: one job needs more than there are, or there is no such GPU.
    """
    gpus, workers = config.workers.gpus, workers_of_job(config)
    needed = workers * max(1, config.workers.gpus_per_proc)
    free = free_gpus(gpus)
    try:
        visible = devices.visible_devices(os.environ, None if free is not None else gpus)
    except ValueError as error:
        raise UsageError(str(error), "", ("--gpus",)) from None
    if visible:
        if needed > len(visible):
            raise UsageError(f"--sweep: a job needs {plural(needed, 'GPU')}, and {len(visible)} can be used")
        chunks = [visible[first : first + needed] for first in range(0, len(visible) - needed + 1, needed)]
        found: list[Gpus] = [(f"free:{needed}",)] * len(chunks) if free is not None else list(chunks)
    else:
        found = [gpus] * max(1, len(os.sched_getaffinity(0)) // workers)
    count = config.jobs or len(found)
    return [found[number % len(found)] for number in range(min(count, len(config.sweep_jobs)))]


def workers_of_job(config: LaunchConfig) -> int:
    """One, unless the user has said how many: many small jobs are what a file of jobs is mostly for.

    Raises:
        UsageError: there is no device of the kind that --nproc-per-node names.
    """
    nproc = config.workers.nproc_per_node
    if nproc is None:
        return 1
    visible = devices.visible_devices(os.environ, None) if isinstance(nproc, str) else None
    try:
        return devices.resolve_nproc(nproc, visible, config.workers.gpus_per_proc)
    except ValueError as error:
        raise UsageError(str(error)) from None


def of_job(config: LaunchConfig, job: Job, gpus: Gpus) -> LaunchConfig:
    """The configuration of the run of one job."""
    workers = replace(config.workers, nproc_per_node=workers_of_job(config), gpus=gpus)
    config = replace(config, sweep=None, sweep_jobs=(), jobs=None, script_args=(*config.script_args, *job))
    if free_gpus(gpus) is not None and config.wait_for_gpus_s is None:
        config = replace(config, wait_for_gpus_s=_WAIT_S)
    return replace(config, workers=workers)


def threads(config: LaunchConfig, places: Iterable[Gpus]) -> int:
    """The CPUs of this machine for each worker of all jobs that run at a time."""
    return max(1, len(os.sched_getaffinity(0)) // (len(list(places)) * workers_of_job(config)))
