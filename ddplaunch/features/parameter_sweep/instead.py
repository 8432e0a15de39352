"""Runs many jobs in place of a single run, for ``--sweep``. In the process that the user started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError
from ddplaunch.features.parameter_sweep import places, run_jobs
from ddplaunch.launcher import setup
from ddplaunch.system.files import run_folder

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.parameter_sweep.results import SweepResult


def run(config: LaunchConfig, run_id: str, folder: Path | None, *, stdout_fd: int, ends_process: bool) -> SweepResult:
    """Run all jobs, and return the result; see ``run_jobs.run``.

    ``folder`` is that of a detached run; else it is made. The table of all jobs goes to ``stdout_fd``.
    ``ends_process``: False where a program has called ``launch``.

    Raises:
        UsageError: what the jobs need does not fit this machine.
        LaunchError: no folder can be made.
    """
    if folder:
        return run_jobs.run(config, run_id, folder, is_detached=True)
    places.of_jobs(config)
    folder, warning = setup.create_run_folder(config, run_id)
    if folder is None:
        raise LaunchError(warning or "no run folder", "The jobs' output is written there. See --log-dir.")
    with run_folder.released(folder):
        if ends_process:
            return run_jobs.run(config, run_id, folder, is_detached=False)
        from ddplaunch.features.parameter_sweep import own_process

        return own_process.run(config, run_id, folder, stdout_fd)
