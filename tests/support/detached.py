"""Runs that were started with --detach: what their files and their launchers say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ddplaunch.system import run_tags
from tests.support.processes import wait_until
from tests.support.runs import run

JOB = f"job{os.getpid()}"
"""A run id that no test of another process uses at the same time: live runs are found on the whole machine."""

UNTIL = 'echo begins; while [ ! -e "$0" ]; do sleep 0.05; done; echo ends; exit 7'
"""A shell program that ends with code 7 once the file of its first argument exists."""


def job(go: Path, *options: str) -> tuple[str, ...]:
    """Options and program of a run that ends with code 7 once the file ``go`` exists."""
    return (*options, "--no-python", "sh", "-c", UNTIL, str(go))


def started(go: Path, *options: str) -> str:
    """The run id of a detached run, whose workers have begun."""
    returned = run("--detach", *job(go, *options))
    assert returned.returncode == 0, returned.err
    run_id = returned.out.strip()
    wait_for_log(run_id, "begins")
    return run_id


def folder_of(run_id: str) -> Path:
    """The run folder."""
    return Path(os.environ["XDG_STATE_HOME"], "ddplaunch", run_id)


def launcher_of(run_id: str) -> int:
    """The pid of the launcher."""
    pid = json.loads((folder_of(run_id) / "run.json").read_text())["pid"]
    assert run_id in run_tags.launcher_memfds(pid)
    return int(pid)


def wait_for_log(run_id: str, text: str) -> None:
    """Wait for a text in console.log."""
    log = folder_of(run_id) / "console.log"
    wait_until(lambda: log.exists() and text in log.read_text(), 30, f"no {text!r}")


def report_of(run_id: str) -> dict[str, Any]:
    """report.json, once the run has ended."""
    report = folder_of(run_id) / "report.json"
    wait_until(report.exists, 30)
    return dict(json.loads(report.read_text()))
