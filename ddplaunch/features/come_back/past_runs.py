"""``--ps --all``: the runs that have left a run folder on this machine, whether they go on, have ended or were killed.

Runs in the process that the user started, and only reads. Files may be damaged, cut or of another version of ddplaunch:
what cannot be read is unknown, and never stops the listing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.features.come_back import past_runs_page as page
from ddplaunch.features.come_back.past_runs_page import PastRun
from ddplaunch.launcher.display import console_log
from ddplaunch.launcher.run_files import past_reports
from ddplaunch.system.files import run_folder, run_folders, run_json
from ddplaunch.system.files.run_folder import LOCK
from ddplaunch.system.files.run_json import Json, dicts, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddplaunch.launcher.request import Request


def list_all(request: Request) -> None:
    """List the runs in the default folder and in --log-dir, the newest first, in lines as long as the terminal's."""
    bases = run_folders.bases(request.log_dir)
    runs = [run for run, _ in _found(bases)]
    if runs:
        request.show(page.run_table(runs, _columns()))
    else:
        where = " or ".join(map(str, bases)) or "a home folder: there is none"
        request.report(f"no run folder of yours in {where}")


def _columns() -> int | None:
    """Width of the terminal on stdout; None if it is none."""
    try:
        return os.get_terminal_size(1).columns or None
    except OSError:
        return None


def found(log_dir: str | None) -> list[tuple[PastRun, tuple[Path, ...]]]:
    """The runs in the default folder and in ``log_dir`` with the folders of their launchers, the newest first."""
    return _found(run_folders.bases(log_dir))


def cells(run: PastRun) -> tuple[str, ...]:
    """What the list shows of a run: run id, start, duration, result, command, first cause; escaped."""
    return page.row(run)


def _found(bases: Iterable[Path]) -> list[tuple[PastRun, tuple[Path, ...]]]:
    runs = [(of_launchers(folders), folders) for folders in _folders(bases)]
    return sorted(runs, key=lambda item: (item[0].start_s, item[0].run_id), reverse=True)


def _folders(bases: Iterable[Path]) -> Iterator[tuple[Path, ...]]:
    """The run folders in ``bases``, each as those of its launchers; others are passed over, such as another user's."""
    for base in bases:
        with contextlib.suppress(OSError):
            for entry in os.scandir(base):
                folder = Path(entry.path)
                if found := run_folder.of_launchers(folder) or ((folder,) if _has_files(entry) else ()):
                    yield found


def _has_files(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        files = (os.path.join(entry.path, name) for name in (run_json.RUN, run_json.REPORT))
        return entry.is_dir(follow_symlinks=False) and any(map(os.path.isfile, files))
    return False


def of_launchers(folders: Sequence[Path]) -> PastRun:
    """One run: what the launcher tells whose part says most about it, if every node has one."""
    runs = sorted(map(_past_run, folders), key=lambda run: run.start_s)
    telling = max(runs, key=lambda run: _WEIGHTS.get(run.result, 1 if run.result != "exit 0" else 0))
    return replace(telling, start_s=runs[0].start_s)


_WEIGHTS = {page.RUNNING: 4, page.KILLED: 3, page.DAMAGED: 2, page.NO_REPORT: 2}


def _past_run(folder: Path) -> PastRun:
    started, report = run_json.read(folder / run_json.RUN), run_json.read(folder / run_json.REPORT)
    known = {**(started or {}), **(report or {})}
    start_s = run_json.seconds(known, "start") or _made_s(folder)
    result = _result(folder, started, report)
    return PastRun(
        run_id=text(known, "run_id") or folder.name,
        start_s=start_s,
        duration_s=run_json.number(known, "duration_s") if report else _duration_s(folder, start_s, result),
        result=result,
        command=past_reports.command(known),
        cause=_cause(report) if report else "",
    )


def _made_s(folder: Path) -> float:
    """When the folder was made, in seconds since 1970; 0 if it cannot be read. For reports without a start."""
    for path in (folder / LOCK, folder):
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _duration_s(folder: Path, start_s: float, result: str) -> float | None:
    """Of a run without a report: up to now, or for a killed run to the last line of its console.log."""
    if result == page.RUNNING:
        return time.time() - start_s
    with contextlib.suppress(OSError):
        return (folder / console_log.FILE).stat().st_mtime - start_s if result == page.KILLED else None
    return None


# How it ended.


def _result(folder: Path, started: Json | None, report: Json | None) -> str:
    if report is not None:
        code = report.get("exit_code")
        return f"exit {code}" if type(code) is int else page.DAMAGED
    if os.path.lexists(folder / run_json.REPORT):
        return page.DAMAGED
    if started is None:  # Of an older version, damaged, or the logs of a node whose launcher is elsewhere.
        return page.NO_REPORT
    if run_folders.is_running(folder, started):
        return page.RUNNING
    return page.KILLED if started.get("host") == socket.gethostname() else page.NO_REPORT


def _cause(report: Json) -> str:
    """Why the run did not succeed, in one line; empty if it did, or if the report does not say it."""
    if report.get("outcome") == "succeeded":
        return ""
    first = report.get("first_failure")
    if isinstance(first, dict):
        why = past_reports.failure(first).removeprefix("failed: ")
        return f"rank {first.get('rank', '?')} on {first.get('host', '?')}: {why}"
    if report.get("outcome") == "stopped" and (signal := text(report, "signal")):
        return signal  # An attempt's reason is what the signal has caused.
    attempts = [*dicts(report, "attempts")]
    reason = text(attempts[-1], "reason") if attempts else ""
    return text(report, "reason").partition("\n")[0] or reason or text(report, "signal")
