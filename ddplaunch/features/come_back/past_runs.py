"""``--ps --all``: the runs that have left a run folder on this machine, whether they go on, have ended or were killed.

Runs in the process that the user started, and only reads. Files may be damaged, cut or of another version of ddplaunch:
what cannot be read is unknown, and never stops the listing.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.features.runs import run_folders, run_json
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher.display import console_log
from ddplaunch.launcher.display.failure_page import failure
from ddplaunch.system.files import run_folder
from ddplaunch.text import elapsed, local_time, quote, table

if TYPE_CHECKING:
    from ddplaunch.cli.commands import Request
    from ddplaunch.protocol.run_result import RunResult
    from ddplaunch.system.files.run_folder import RunFacts


RUNNING, KILLED = "running", "killed"
NO_REPORT, DAMAGED = "no report", "damaged"
"""``PastRun.result`` where it cannot be known how the run ended."""

_WEIGHTS = {RUNNING: 4, KILLED: 3, DAMAGED: 2, NO_REPORT: 2}
"""Of the results of several launchers, the one with the greatest weight is shown."""

_HEAD = ("run", "start", "duration", "result", "command", "first cause")
_SEPARATOR = 2
_LEAST_ROOM, _LEAST_COMMAND = 48, 12
_MAX_CELL = 1000


@dataclass(frozen=True)
class PastRun:
    """A run that has left a run folder.

    Attributes:
        start_s: start, in seconds since 1970; 0 if it is not known.
        duration_s: duration up to the end, or up to now; None if it is not known.
        result: ``exit`` and the exit code, or one of the words of this module.
        command: the command line, quoted for a shell; empty if it is not known.
        cause: first failure, or another reason why the run did not succeed; empty if there is none.
    """

    run_id: str
    start_s: float
    duration_s: float | None
    result: str
    command: str
    cause: str


def list_all(request: Request) -> None:
    """List the runs in the default folder and in --log-dir, the newest first, in lines as long as the terminal's."""
    if runs := [run for run, _ in found(request.log_dir)]:
        request.show(run_table(runs, _columns()))
    else:
        where = " or ".join(map(str, run_folders.bases(request.log_dir))) or "a home folder: there is none"
        request.report(f"no run folder of yours in {where}")


def _columns() -> int | None:
    """Width of the terminal on stdout; None if it is none."""
    try:
        return os.get_terminal_size(1).columns or None
    except OSError:
        return None


def found(log_dir: str | None) -> list[tuple[PastRun, tuple[Path, ...]]]:
    """The runs in the default folder and in ``log_dir`` with the folders of their launchers, the newest first."""
    runs = [(of_launchers(folders), folders) for folders in all_folders(log_dir)]
    return sorted(runs, key=lambda item: (item[0].start_s, item[0].run_id), reverse=True)


def all_folders(log_dir: str | None) -> Iterator[tuple[Path, ...]]:
    """The run folders in the default folder and in ``log_dir``, each as those of its launchers, in any order.

    Others are passed over, such as another user's. Of a run no file is read.
    """
    for base in run_folders.bases(log_dir):
        with contextlib.suppress(OSError), os.scandir(base) as entries:
            for entry in entries:
                folder = Path(entry.path)
                if found := run_json.of_launchers(folder) or ((folder,) if _has_files(entry) else ()):
                    yield found


def _has_files(entry: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        files = (os.path.join(entry.path, name) for name in (run_folder.RUN, run_folder.REPORT))
        return run_folder.is_own(Path(entry.path)) and any(map(os.path.isfile, files))
    return False


def of_launchers(folders: Sequence[Path]) -> PastRun:
    """One run: what the launcher tells whose part says most about it, if every node has one."""
    runs = sorted(map(_past_run, folders), key=lambda run: run.start_s)
    telling = max(runs, key=lambda run: _WEIGHTS.get(run.result, 1 if run.result != "exit 0" else 0))
    return replace(telling, start_s=runs[0].start_s)


def _past_run(folder: Path) -> PastRun:
    started, report = run_json.facts(folder), run_json.report(folder)
    known = report or started
    start_s = run_json.seconds(known.start) or run_json.seconds(started.start) or run_folders.made_s(folder)
    result = _result(folder, started, report)
    return PastRun(
        run_id=known.run_id or folder.name,
        start_s=start_s,
        duration_s=report.duration_s if report else _duration_s(folder, start_s, result),
        result=result,
        command=shlex.join(known.command or started.command) or started.script,
        cause=_cause(report) if report else "",
    )


def _duration_s(folder: Path, start_s: float, result: str) -> float | None:
    """Of a run without a report: up to now, or for a killed run to the last line of its console.log."""
    if result == RUNNING:
        return time.time() - start_s
    with contextlib.suppress(OSError):
        return (folder / console_log.FILE).stat().st_mtime - start_s if result == KILLED else None
    return None


# How it ended.


def _result(folder: Path, started: RunFacts, report: RunResult | None) -> str:
    if report:
        return f"exit {report.exit_code}"
    if os.path.lexists(folder / run_folder.REPORT):
        return DAMAGED
    if not started.host:  # Of an older version, damaged, or the logs of a node whose launcher is elsewhere.
        return NO_REPORT
    if run_folders.is_running(folder, started):
        return RUNNING
    return KILLED if started.host == socket.gethostname() else NO_REPORT


def _cause(report: RunResult) -> str:
    """Why the run did not succeed, in one line; empty if it did, or if the report does not say it."""
    if report.outcome == "succeeded":
        return ""
    if first := report.first_failure:
        return f"rank {first.rank} on {first.host}: {failure(first).removeprefix('failed: ')}"
    if report.outcome == "stopped" and report.signal:
        return report.signal  # An attempt's reason is what the signal has caused.
    reason = report.attempts[-1].reason if report.attempts else ""
    return report.reason.partition("\n")[0] or reason or report.signal or ""


# The table.


def run_table(runs: Sequence[PastRun], columns: int | None) -> str:
    """One line per run, of at most ``columns`` characters; None: lines are not cut.

    On a narrow terminal the causes are in lines of their own.
    """
    rows = list(map(cells, runs))
    if columns is None:
        return "\n".join(table([_HEAD, *rows]))
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    room = columns - sum(widths[:-2]) - _SEPARATOR * (len(widths) - 1)
    lines = _narrow(rows, room) if room < _LEAST_ROOM else table(_fitted([_HEAD, *rows], room, *widths[-2:]))
    return "\n".join(_cut(line, columns) for line in lines)


def _narrow(rows: Sequence[tuple[str, ...]], room: int) -> Iterator[str]:
    """Lines with a cause in an indented line below its run."""
    command = max(_LEAST_COMMAND, room + _SEPARATOR)
    cut = [(*row[:-2], _cut(row[-2], command)) for row in rows]
    head, *lines = table([_HEAD[:-1], *cut])
    yield head
    for line, row in zip(lines, rows, strict=True):
        yield line
        if row[-1]:
            yield f"  {row[-1]}"


def cells(run: PastRun) -> tuple[str, ...]:
    """What the list shows of a run: run id, start, duration, result, command, first cause; escaped."""
    duration = "?" if run.duration_s is None else elapsed(run.duration_s)
    start = (run.start_s and local_time(run.start_s, "%Y-%m-%d %H:%M")) or "?"
    found = (run.run_id, start, duration, run.result, run.command or "?", run.cause)
    return tuple(quote(cell, _MAX_CELL) for cell in found)


def _fitted(rows: Sequence[tuple[str, ...]], room: int, command: int, cause: int) -> list[tuple[str, ...]]:
    """``rows`` whose last two cells together have at most ``room`` characters; the arguments are their widths.

    The cause gets what it needs, up to half of the room or what the command leaves.
    """
    cause = min(cause, max(room // 2, room - command))
    return [(*row[:-2], _cut(row[-2], room - cause), _cut(row[-1], cause)) for row in rows]


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 3]}..."
