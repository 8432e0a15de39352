"""Which ranks an attempt of a run had, and where their log files are, from the files in its run folder.

Runs in the process that the user started, and only reads. Files may be cut or damaged: such lines are passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import run_events
from ddplaunch.system.files import kept_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddplaunch.system.files.run_folders import RunFolder

STREAMS = ("stdout", "stderr")


@dataclass(frozen=True)
class RankLogs:
    """The log files of one rank in one attempt.

    Attributes:
        folder: has the files, if they are on this machine; None if they are only on ``host``.
        subfolder: where they are in the run folder on ``host``.
        last_lines: the end of the output of a failed rank, which was sent to this machine; None if there is none.
    """

    rank: int
    host: str
    folder: Path | None
    subfolder: str
    last_lines: Path | None = None


def of_run(run: RunFolder) -> dict[int, dict[int, RankLogs]]:
    """The logs by attempt and rank, as far as attempts have started."""
    found: dict[int, dict[int, RankLogs]] = {}
    for folder in run.of_all_launchers():
        starts = list(_starts(folder))
        # The files of several nodes are in a folder for each host.
        is_alone = len({event["host"] for event in starts}) == 1
        for event in starts:
            by_rank = found.setdefault(event["attempt"], {})
            for local_rank in range(event["workers"]):
                rank = event["first_rank"] + local_rank
                by_rank[rank] = _logs(folder, event, rank, local_rank, is_alone=is_alone)
    return found


_NUMBERS = {"attempt": 1 << 30, "workers": 1 << 16, "first_rank": 1 << 30}
"""Keys of an event, and what their numbers are below."""


def _starts(folder: Path) -> Iterator[dict[str, Any]]:
    """The events about workers that were started, in their order."""
    with contextlib.suppress(OSError), kept_files.open_regular(folder / run_events.FILE) as file:
        for line in file:
            if b"attempt_started" not in line:
                continue
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") == "attempt_started" and _is_whole(event):
                    yield event


def _is_whole(event: dict[str, Any]) -> bool:
    numbers = all(type(event.get(key)) is int and 0 <= event[key] < limit for key, limit in _NUMBERS.items())
    host = event.get("host")
    return numbers and isinstance(host, str) and bool(host) and "/" not in host and host not in (".", "..")


def _logs(folder: Path, event: dict[str, Any], rank: int, local_rank: int, *, is_alone: bool) -> RankLogs:
    subfolder, host = f"attempt_{event['attempt']}/{local_rank}", event["host"]
    places = (folder / host / subfolder, *((folder / subfolder,) if is_alone else ()))
    last_lines = folder / "failed" / f"rank_{rank}" / "last_lines.log"
    return RankLogs(
        rank,
        host,
        next(filter(os.path.isdir, places), None),
        subfolder,
        last_lines if os.path.isfile(last_lines) else None,
    )
