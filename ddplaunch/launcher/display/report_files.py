"""The files of a run's result: report.json, report.txt, and the error file for a parent that is torchelastic.

Written by the launcher, at the end of a run: a full disk prevents files, and does not change the run's outcome.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.protocol import first_failure, wire
from ddplaunch.protocol.results import STACKS_FILE, WorkerExit
from ddplaunch.system.files import kept_files
from ddplaunch.system.files.run_folder import FAILURE_PAGE, REPORT

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.protocol.run_result import RunResult

SCHEMA = 2
"""Version of the fields of report.json; files without ``schema`` are version 1."""

_MAX_INDENTED = 1024
"""Workers of a report that is indented."""

_MAX_FOLDERS = 256
"""Of workers, in the folder ``FAILED``."""

FAILED = "failed"
"""Folder with what is known of failed workers of other machines."""


def write_report(result: RunResult, folder: Path) -> None:
    """Write report.json."""
    is_large = sum(len(attempt.exits) for attempt in result.attempts) > _MAX_INDENTED
    lines = _lines(result) if is_large else (json.dumps(_body(result), indent=2),)
    _write(folder / REPORT, (f"{line}\n" for line in lines))


def _body(result: RunResult) -> dict[str, object]:
    return {"schema": SCHEMA, **wire.to_json(result)}


def _lines(result: RunResult) -> Iterator[str]:
    """A line for each worker. With ``indent``, thousands take ten times as long, and five times the memory."""
    body = _body(replace(result, attempts=()))
    del body["attempts"]
    yield "{"
    yield from (f"{json.dumps(name)}: {json.dumps(value)}," for name, value in body.items())
    yield '"attempts": ['
    for number, attempt in enumerate(result.attempts, 1):
        before, empty, after = json.dumps(wire.to_json(replace(attempt, exits=()))).partition('"exits": []')
        yield f"{before}{empty[:-1]}"
        yield from _with_commas(json.dumps(wire.to_json(each)) for each in attempt.exits)
        yield f"]{after}{',' if number < len(result.attempts) else ''}"
    yield "]}"


def _with_commas(lines: Iterable[str]) -> Iterator[str]:
    """``lines``, all but the last with a comma."""
    waiting = None
    for line in lines:
        if waiting is not None:
            yield f"{waiting},"
        waiting = line
    if waiting is not None:
        yield waiting


def write_page(text: str, folder: Path) -> None:
    """Write a failure page to report.txt."""
    _write(folder / FAILURE_PAGE, text + "\n")


def _write(path: Path, text: str | Iterable[str]) -> None:
    with kept_files.noting(path):
        kept_files.write_whole(path, text)


def write_failures(result: RunResult, folder: Path) -> None:
    """Write errors and last lines of failed workers, and stacks, to ``failed/rank_N/``.

    The files are error.json, last_lines.log and, after a hang, stacks.txt. For workers of other machines, whose logs
    are on those machines; of many, for those that are the likeliest causes, and after a hang for the lowest ranks.
    """
    exits = result.attempts[-1].exits if result.attempts else ()
    with kept_files.noting(folder / FAILED):
        for exit_ in first_failure.failures(exits)[:_MAX_FOLDERS]:
            target = _failed_folder(folder, exit_)
            kept_files.write_whole(target / "last_lines.log", "".join(f"{line}\n" for line in exit_.tail))
            write_error_file(exit_, str(target / "error.json"))
        for exit_ in [each for each in exits if each.stacks][:_MAX_FOLDERS]:
            kept_files.write_whole(_failed_folder(folder, exit_) / STACKS_FILE, exit_.stacks)


def _failed_folder(folder: Path, exit_: WorkerExit) -> Path:
    target = folder / FAILED / f"rank_{exit_.rank}"
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    return target


def write_error_file(first: WorkerExit | None, path: str) -> None:
    """Write a worker's failure to ``path`` in torchelastic's format; does nothing if one of them is missing.

    The schema is torch's error file with the exit code added (``errors.ErrorHandler``).
    """
    if first is None or not path or first.error is None:
        return
    extra = {"py_callstack": first.error.traceback, "timestamp": str(int(first.time_s))}
    message = {"message": first.error.message, "errorCode": first.returncode, "extraInfo": extra}
    with contextlib.suppress(OSError), open(path, "w", opener=kept_files.private) as file:
        json.dump({"message": message}, file)
