"""What is known of each job, as a table, as CSV and as JSON, and the jobs that an earlier sweep has done already."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddplaunch.errors import UsageError
from ddplaunch.features.come_back import detached, past_runs
from ddplaunch.features.parameter_sweep import job_lines
from ddplaunch.features.runs import run_folders, run_json
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher.display import console_log
from ddplaunch.protocol import first_failure, wire
from ddplaunch.protocol.run_result import RunResult
from ddplaunch.system.files import kept_files, run_folder
from ddplaunch.text import elapsed, plural, table

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

_JSON, _CSV = "results.json", "results.csv"
_MAX_SHOWN = 200
"""Jobs of a table; of more, only those that have not succeeded are in it."""

State = Literal["waiting", "running", "succeeded", "failed", "stopped", "done before"]

_HEAD = ("job", "state", "exit", "time", "arguments", "failure")
_ORDER: tuple[State, ...] = ("running", "failed", "stopped", "succeeded", "done before", "waiting")
_MAX_ARGUMENTS = 60


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """One job.

    Attributes:
        number: place in the file, counted from 1.
        arguments: those that the other jobs do not have.
        state: ``done before``: it has succeeded in an earlier sweep, and is not run again.
        exit_code: as of a run; None: it has not ended.
        start_t: when it was started, in seconds since 1970; 0: it was not.
        seconds: for which it ran.
        failure: the first failure, in one line; empty: it has not failed.
        run_id: of its run; empty: it was not started.
        folder: its run folder.
    """

    number: int
    arguments: tuple[str, ...]
    state: State = "waiting"
    exit_code: int | None = None
    start_t: float = 0.0
    seconds: float = 0.0
    failure: str = ""
    run_id: str = ""
    folder: str = ""

    def ended(self, returncode: int, *, is_stopped: bool) -> JobResult:
        """The job, whose launcher has ended with this returncode; ``is_stopped``: because all were to stop."""
        exit_code = returncode if returncode >= 0 else 128 - returncode
        state: State = "succeeded" if not exit_code else "stopped" if is_stopped else "failed"
        failure = _failure(Path(self.folder), returncode) if state == "failed" else ""
        seconds = time.time() - self.start_t
        return replace(self, state=state, exit_code=exit_code, seconds=round(max(0.0, seconds), 3), failure=failure)


def _failure(folder: Path, returncode: int) -> str:
    if returncode < 0:
        return f"its launcher {first_failure.ended(returncode)}"
    if cause := past_runs.of_launchers((folder,)).cause:
        return cause
    with_errors = detached.end_of(folder / console_log.FILE).decode("utf-8", "replace").splitlines()
    said = (line.partition("error: ")[2] for line in with_errors if line.startswith("ddplaunch: error: "))
    return next(said, first_failure.describe(returncode))


@dataclass(frozen=True)
class SweepResult(RunResult):
    """The result of many jobs, as ``launch`` returns it.

    Attributes:
        jobs: all jobs, in their order.
    """

    jobs: tuple[JobResult, ...] = ()
    __repr__ = RunResult.__repr__


def count_text(jobs: Sequence[JobResult]) -> str:
    """``64 jobs: 8 running, 1 failed, 3 succeeded, 52 waiting``."""
    counts = Counter(job.state for job in jobs)
    parts = (f"{counts[state]} {state}" for state in _ORDER if counts[state])
    return f"{plural(len(jobs), 'job')}: {', '.join(parts)}"


def job_table(jobs: Iterable[JobResult]) -> list[str]:
    """A line for each job, below a head."""
    return table([_HEAD, *(_row(job, time.time()) for job in jobs)])


def _row(job: JobResult, now: float) -> tuple[str, ...]:
    arguments = job_lines.text(job.arguments)
    if len(arguments) > _MAX_ARGUMENTS:
        arguments = f"{arguments[: _MAX_ARGUMENTS - 3]}..."
    seconds = now - job.start_t if job.state == "running" else job.seconds
    return (
        str(job.number),
        job.state,
        "" if job.exit_code is None else str(job.exit_code),
        elapsed(seconds) if job.start_t and job.state != "done before" else "",
        arguments,
        job.failure,
    )


def last_table(jobs: Sequence[JobResult]) -> str:
    """The table at the end."""
    shown = jobs if len(jobs) <= _MAX_SHOWN else [job for job in jobs if job.state not in ("succeeded", "done before")]
    return "\n".join(job_table(shown)) if shown else count_text(jobs)


def live_table(jobs: Sequence[JobResult], rows: int) -> list[str]:
    """Of at most so many rows: the jobs that run, those that have failed, and the last ones that have succeeded."""
    order = sorted(jobs, key=lambda job: (_ORDER.index(job.state), -job.start_t))
    return [count_text(jobs), *job_table(sorted(order[: max(1, rows - 3)], key=lambda job: job.number))]


# Files.


def write(folder: Path, config: LaunchConfig, jobs: Sequence[JobResult]) -> None:
    """Write results.json and results.csv, each whole. An error of the disk is noted."""
    body = {**_key(config), "jobs": [asdict(job) for job in jobs]}
    for name, text in ((_JSON, json.dumps(body, indent=1) + "\n"), (_CSV, _as_csv(jobs))):
        with kept_files.noting(folder / name):
            kept_files.write_whole(folder / name, text)


def _as_csv(jobs: Sequence[JobResult]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("job", "state", "exit_code", "seconds", "arguments", "failure", "run_id", "folder"))
    for job in jobs:
        arguments = job_lines.text(job.arguments)
        code = "" if job.exit_code is None else job.exit_code
        row = (job.number, job.state, code, job.seconds, arguments, job.failure, job.run_id, job.folder)
        writer.writerow(str(cell).encode("utf-8", "backslashreplace").decode() for cell in row)
    return text.getvalue()


def _key(config: LaunchConfig) -> dict[str, object]:
    """By what an earlier sweep is the same as this one."""
    file = config.sweep if config.sweep == "-" else os.path.abspath(config.sweep or "")
    return {"file": file, "script": config.script, "script_args": list(config.script_args)}


def read(folder: Path) -> SweepResult | None:
    """The result of a sweep that has ended; None: there is no report."""
    report = run_json.report(folder)
    return SweepResult(**vars(report), jobs=_jobs(folder)) if report else None


def _jobs(folder: Path) -> tuple[JobResult, ...]:
    """Of results.json, as far as it can be read."""
    jobs = _read(folder).get("jobs")
    found = (wire.salvage(JobResult, job) for job in jobs if isinstance(job, dict)) if isinstance(jobs, list) else ()
    return tuple(filter(None, found))


# An earlier sweep.


def earlier(config: LaunchConfig) -> Path:
    """The folder of the newest sweep of the same file and script.

    Raises:
        UsageError: there is none, or it goes on.
    """
    log_dir = config.output.log_dir
    base = Path(log_dir).absolute() if log_dir else run_folder.base_at_home(os.environ)
    found = [folder for folder in base.iterdir() if _is_same(folder, config)] if base and os.path.isdir(base) else []
    if not found:
        raise UsageError(f"--retry-failed: no sweep of {config.sweep} with this script and its arguments in {base}")
    newest = max(found, key=run_folders.made_s)
    if run_json.is_locked(newest):
        raise UsageError(f"--retry-failed: {newest.name} has not ended", f"To wait: ddplaunch --wait {newest.name}.")
    return newest


def not_done(before: Path, jobs: Sequence[JobResult]) -> list[JobResult]:
    """``jobs``, with those that have succeeded in the sweep with the folder ``before`` as done."""
    done = {job.arguments: job for job in _jobs(before) if _has_succeeded(job)}
    return [_done_before(job, done[job.arguments]) if job.arguments in done else job for job in jobs]


def _is_same(folder: Path, config: LaunchConfig) -> bool:
    body = _read(folder)
    return bool(body.get("jobs")) and {name: body.get(name) for name in _key(config)} == _key(config)


def _read(folder: Path) -> dict[str, Any]:
    return run_json.read(folder / _JSON) or {}


def _has_succeeded(job: JobResult) -> bool:
    """A job that ran when its sweep was killed may have ended all the same."""
    if job.state == "running":
        report = run_json.read(Path(job.folder) / run_folder.REPORT) or {}
        return run_json.integer(report, "exit_code") == 0
    return job.state in ("succeeded", "done before")


def _done_before(job: JobResult, earlier: JobResult) -> JobResult:
    return replace(earlier, number=job.number, state="done before", exit_code=0)
