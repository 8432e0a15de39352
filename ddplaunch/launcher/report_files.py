"""What a run leaves in files: its verdict as JSON, the page, and an error file for the process above."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch import protocol, verdict

if TYPE_CHECKING:
    from ddplaunch.model import RunResult, WorkerExit


def write(result: RunResult, folder: Path, text: str) -> None:
    """Leave report.json and, of a failure, report.txt in the run's folder. A full disk is passed over."""
    with contextlib.suppress(OSError):
        _write_whole(folder / "report.json", json.dumps(protocol.to_json(result), indent=2) + "\n")
        if text:
            _write_whole(folder / "report.txt", text + "\n")


def write_failures(result: RunResult, folder: Path) -> None:
    """Keep what failed workers of other machines said last: ``failed/rank_N/{error.json,last_lines.log}``."""
    for exit_ in verdict.failures(result.attempts[-1].exits) if result.attempts else ():
        with contextlib.suppress(OSError):
            place = folder / "failed" / f"rank_{exit_.rank}"
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_whole(place / "last_lines.log", "".join(f"{line}\n" for line in exit_.tail))
            reply(exit_, str(place / "error.json"))


def _write_whole(path: Path, text: str) -> None:
    """All of it or no file at all: half a report is worse than none."""
    part = path.with_suffix(".part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def reply(first: WorkerExit | None, path: str) -> None:
    """Tell the process above, as torchrun does: the first failure's error file with its exit code added to it."""
    if first is None or not path or first.error is None:
        return
    extra = {"py_callstack": first.error.traceback, "timestamp": str(int(first.time_s))}
    message = {"message": first.error.message, "errorCode": first.returncode, "extraInfo": extra}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}))
