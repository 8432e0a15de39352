"""The files of a run's result: report.json, report.txt, and the error file for a parent that is torchelastic.

Runs in the launcher, at the end of a run. A full disk prevents files, and does not change the run's outcome.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

from ddplaunch.protocol import first_failure, stack_dump, wire
from ddplaunch.system.files import private_file, run_json

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.protocol.results import RunResult, WorkerExit

SCHEMA = 2
"""Version of the fields of report.json; files without ``schema`` are version 1."""


def write_report(result: RunResult, folder: Path) -> bool:
    """Write report.json. Returns whether the disk took it."""
    try:
        write_whole(folder / run_json.REPORT, json.dumps({"schema": SCHEMA, **wire.to_json(result)}, indent=2) + "\n")
    except OSError:
        return False
    return True


def write_page(text: str, folder: Path) -> None:
    """Write a failure page to report.txt. Errors of the disk are ignored."""
    with contextlib.suppress(OSError):
        write_whole(folder / "report.txt", text + "\n")


def write_failures(result: RunResult, folder: Path) -> None:
    """Write errors and last lines of failed workers, and stacks, to ``failed/rank_N/``.

    The files are error.json, last_lines.log and, after a hang, stacks.txt. For workers of other machines, whose logs
    are on those machines.
    """
    exits = result.attempts[-1].exits if result.attempts else ()
    with contextlib.suppress(OSError):
        for exit_ in first_failure.failures(exits):
            target = _failed_folder(folder, exit_)
            write_whole(target / "last_lines.log", "".join(f"{line}\n" for line in exit_.tail))
            write_error_file(exit_, str(target / "error.json"))
        for exit_ in exits:
            if exit_.stacks:
                write_whole(_failed_folder(folder, exit_) / stack_dump.FILE, exit_.stacks)


def _failed_folder(folder: Path, exit_: WorkerExit) -> Path:
    target = folder / "failed" / f"rank_{exit_.rank}"
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    return target


def write_whole(path: Path, text: str) -> None:
    """Write the whole file or none, for the user alone: readers must not see a partial report.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_suffix(".part")
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_error_file(first: WorkerExit | None, path: str) -> None:
    """Write a worker's failure to ``path`` in torchelastic's format; does nothing if one of them is missing.

    The schema is torch's error file with the exit code added (``errors.ErrorHandler``).
    """
    if first is None or not path or first.error is None:
        return
    extra = {"py_callstack": first.error.traceback, "timestamp": str(int(first.time_s))}
    message = {"message": first.error.message, "errorCode": first.returncode, "extraInfo": extra}
    with contextlib.suppress(OSError), open(path, "w", opener=private_file.opener) as file:
        json.dump({"message": message}, file)
