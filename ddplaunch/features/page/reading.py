"""Reads the files of a run folder, whatever state they are in: what is missing or damaged becomes a sentence.

Never raises for the content of a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import field
from pathlib import Path

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.run_events import FILE as EVENTS
from ddplaunch.protocol.run_events import KINDS
from ddplaunch.system.files import kept_files, run_folder, run_json
from ddplaunch.system.files.run_json import Json, integer, number
from ddplaunch.text import escape, plural

_MAX_BYTES = 256 << 20
_MAX_LINE = 1000
_CONTROL_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[()][0-9A-Z])")


@dataclass
class RunFiles:
    """What a run folder has.

    Attributes:
        started: run.json; empty if it cannot be read.
        report: report.json; empty if there is none yet, or if it cannot be read.
        events: the lines of events.jsonl, by time.
        usage: the files with usage samples, one for each node.
        is_live: a launcher holds the lock of the folder.
        launchers: the folders of the run's launchers; of the only one, ``folder`` itself.
        missing: what the page cannot show, and why; sentences.
        notes: what to know about this page; sentences.
    """

    folder: Path
    started: Json
    report: Json
    events: list[Json]
    usage: list[Path]
    is_live: bool
    launchers: list[Path]
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(folder: Path) -> RunFiles:
    """The files of the folder of one launcher."""
    missing: list[str] = []
    is_live = run_folder.is_locked(folder)
    started = run_json.read(folder / run_json.RUN) or {}
    if not started:
        missing.append(_absent(folder / run_json.RUN, "command and start are not known"))
    report = run_json.read(folder / run_json.REPORT) or {}
    if not report and not (is_live and not os.path.exists(folder / run_json.REPORT)):
        missing.append(_absent(folder / run_json.REPORT, "exit code and failures are not known"))
    events = _events(folder / EVENTS, missing)
    usage = _usage(folder)
    return RunFiles(folder, started, report, events, usage, is_live, [folder], missing)


def _absent(path: Path, effect: str) -> str:
    return f"{path.name} {'is damaged' if os.path.exists(path) else 'is missing'}: {effect}."


def _events(path: Path, missing: list[str]) -> list[Json]:
    if not os.path.exists(path):
        missing.append(f"{path.name} is missing: the times of attempts are those of the report.")
        return []
    found, damaged = json_lines(path)
    events = [each for each in found if run_json.text(each, "event") in KINDS and number(each, "t") is not None]
    if damaged:
        missing.append(f"{path.name}: {plural(damaged, 'line')} cannot be read.")
    lost = sum(integer(event, "count") or 0 for event in events if event["event"] == "dropped")
    if lost:
        missing.append(f"{path.name}: {plural(lost, 'event')} could not be written.")
    return sorted(events, key=lambda event: float(event["t"]))


def _usage(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        files = [path for path in (folder / "samples").iterdir() if re.fullmatch(r"node_\d{1,9}\.jsonl", path.name)]
        return sorted(files, key=lambda path: int(path.stem.removeprefix("node_")))
    return []


def json_lines(path: Path) -> tuple[list[Json], int]:
    """The objects in a file, one for each line, and how many lines are none."""
    found, damaged = [], 0
    for line in content(path).split(b"\n"):
        if line.strip():
            try:
                body = json.loads(line)
            except (ValueError, RecursionError):
                body = None
            if isinstance(body, dict):
                found.append(body)
            else:
                damaged += 1
    return found, damaged


def content(path: Path, limit: int = _MAX_BYTES) -> bytes:
    """The first ``limit`` bytes of a regular file; empty if it cannot be read."""
    with contextlib.suppress(OSError, MemoryError), kept_files.open_regular(path) as file:
        return file.read(limit)
    return b""


# Text of other processes.


def line(text: str, limit: int = _MAX_LINE) -> str:
    """``text`` on one line, without colours, other control characters escaped, cut after ``limit`` characters."""
    return block(text.replace("\n", " ").replace("\t", " "), limit, limit)


def block(text: str, limit: int = 20_000, columns: int = _MAX_LINE) -> str:
    """As ``line``, with its lines kept; of a text over ``limit`` characters the middle is left out."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters are left out ...\n{text[-half:]}"
    lines = (_CONTROL_SEQUENCE.sub("", each.rstrip("\r")) for each in text.split("\n"))
    return "\n".join(escape(each if len(each) <= columns else f"{each[:columns]} ...") for each in lines)
