"""Reads run folders: whose they are, their locks, their JSON files, which may be damaged, cut, or of another version.

Used by all that read run folders: commands, the page, the agent of ``--ps``. Must not block, and must not raise for any
content of a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplaunch.system import procfs
from ddplaunch.system.files import kept_files, run_folder
from ddplaunch.system.files.run_folder import LOCK, NODES, REPORT, RUN, RunFacts

if TYPE_CHECKING:
    from ddplaunch.protocol.run_result import RunResult

EVENTS = "events.jsonl"

Json = dict[str, Any]
_MAX_BYTES = 256 << 20
"""A report of ten thousand workers, each with its last lines, has some tens of MB."""

_MAX_LINE_BYTES = 16 << 20
_MAX_PID = 1 << 22
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)
"""NaN and infinity are no JSON, and no value."""

_LIMITS = {"attempt": 1 << 30, "workers": 1 << 16, "first_rank": 1 << 30}
"""Keys of an event, and what their numbers are below."""

_MAX_STARTED = 1 << 20
"""Workers of all attempts together: readers keep something of each."""


def facts(folder: Path) -> RunFacts:
    """What run.json in ``folder`` says."""
    body = read(folder / RUN) or {}
    pid = body.get("pid")
    return RunFacts(
        run_id=text(body, "run_id"),
        run_tag=text(body, "run_tag"),
        script=text(body, "script"),
        command=tuple(words(body, "command")),
        cwd=text(body, "cwd"),
        start=text(body, "start"),
        host=text(body, "host"),
        pid=pid if type(pid) is int and 0 < pid <= _MAX_PID else 0,
        line_prefix=text(body, "line_prefix"),
    )


def report(folder: Path) -> RunResult | None:
    """What report.json in ``folder`` says, as far as it can be read; None if there is none."""
    from ddplaunch.protocol import wire
    from ddplaunch.protocol.run_result import RunResult

    return wire.salvage(RunResult, read(folder / REPORT))


def of_launcher(pid: int) -> Iterator[tuple[Path, RunFacts]]:
    """Folder and run.json of every run whose lock process ``pid`` holds; none if its descriptors may not be read."""
    with contextlib.suppress(OSError):
        for target in procfs.open_files(pid):
            if target.endswith(f"/{LOCK}") and os.path.isfile(Path(target).with_name(RUN)):
                yield Path(target).parent, facts(Path(target).parent)


# Folders.


def of_launchers(run: Path) -> tuple[Path, ...]:
    """The folders of a run's launchers: ``run`` itself, or those in it if each node has a launcher.

    Empty if ``run`` is no run folder, or if it may be another user's, who could say anything. Does not raise.
    """
    with contextlib.suppress(OSError):
        if not run_folder.is_own(run):
            return ()
        if os.path.isfile(run / LOCK):
            return (run,)
        if has_launchers(run):
            return tuple(
                sorted(path for path in run.iterdir() if not os.path.islink(path) and os.path.isfile(path / LOCK))
            )
    return ()


def has_launchers(folder: Path) -> bool:
    """Whether ``folder`` is that of a run in which each node has a launcher. Does not raise.

    Where others can write, as in a shared --log-dir, anybody may have put the marker.
    """
    with contextlib.suppress(OSError):
        return os.path.isfile(folder / NODES) and not run_folder.is_public(folder)
    return False


def is_locked(folder: Path) -> bool:
    """Whether a launcher holds the folder's lock; false also where the file system has no locks. Does not raise."""
    with contextlib.suppress(OSError):
        try:
            fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)  # NFS locks only files open for writing.
        except OSError:  # Of another user who lets others read, or on a disk that is mounted read-only.
            fd = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            kept_files.close(fd)
    return False


# Files.


def read(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if it is no regular file, cannot be read, or holds anything else."""
    with contextlib.suppress(OSError, ValueError, RecursionError, MemoryError), kept_files.open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= _MAX_BYTES:
            body = json.loads(file.read(_MAX_BYTES))
            return body if isinstance(body, dict) else None
    return None


def lines(
    path: Path,
    having: bytes = b"",
    max_bytes: int = _MAX_BYTES,
    is_wanted: Callable[[bytes], bool] | None = None,
) -> Iterator[Json | None]:
    """The object of each line with ``having`` in it, in the first ``max_bytes`` of a file; None for a damaged line.

    ``is_wanted``: whether a line is to be decoded.
    """
    with contextlib.suppress(OSError, MemoryError), kept_files.open_regular(path) as file:
        done = 0
        while done < max_bytes and (line := file.readline(_MAX_LINE_BYTES)):
            done += len(line)
            if having in line and line.strip() and (is_wanted is None or is_wanted(line)):
                try:
                    body = _DECODER.decode(line.decode())
                except (ValueError, RecursionError):
                    body = None
                yield body if isinstance(body, dict) else None


def starts(events: Iterable[Json | None]) -> Iterator[tuple[Json, int, range]]:
    """The events about workers that were started on a node, each with its attempt and ranks; no damaged ones.

    They end before the one with which there are more than ``_MAX_STARTED`` workers.
    """
    left = _MAX_STARTED
    for event in events:
        if event and event.get("event") == "attempt_started":
            values = ((integer(event, key), limit) for key, limit in _LIMITS.items())
            numbers = [value for value, limit in values if value is not None and 0 <= value < limit]
            if len(numbers) == len(_LIMITS):
                attempt, workers, first = numbers
                left -= workers
                if left < 0:
                    return
                yield event, attempt, range(first, first + workers)


# Values.


def job_end(events: Iterable[Json]) -> float | None:
    """When the scheduler ends the job, in seconds since 1970, as a run has noted it last; None: no run has noted it."""
    ends = [number(event, "end_t") for event in events if event.get("event") == "time_limit"]
    return ends[-1] if ends else None


def checkpoint(events: Iterable[Json]) -> tuple[str, float] | None:
    """The newest checkpoint, in words, and when it was saved, in seconds since 1970; None: no run has noted one."""
    found = [event for event in events if event.get("event") == "checkpoint" and number(event, "saved_t") is not None]
    return (text(found[-1], "text").removeprefix("checkpoint: "), float(found[-1]["saved_t"])) if found else None


def text(body: Json, key: str) -> str:
    """The text at ``key``; empty if there is none."""
    value = body.get(key)
    return value if isinstance(value, str) else ""


def finite(value: object) -> float | None:
    """``value`` if it is a finite number; None for anything else."""
    with contextlib.suppress(OverflowError):  # JSON has integers that no float can hold.
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def number(body: Json, key: str) -> float | None:
    """The number at ``key``; None for anything else, and for one that no time or size can be."""
    value = finite(body.get(key))
    return value if value is not None and abs(value) < 1e15 else None


def seconds(iso_time: str) -> float | None:
    """An ISO 8601 time in seconds since 1970; None for any other text."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromisoformat(iso_time).timestamp()
    return None


def integer(body: Json, key: str) -> int | None:
    """The whole number at ``key``; None for anything else."""
    value = number(body, key)
    return int(value) if value is not None and value == int(value) else None


def dicts(body: Json, key: str) -> Iterator[Json]:
    """The objects in the list at ``key``."""
    value = body.get(key)
    yield from (item for item in value if isinstance(item, dict)) if isinstance(value, list) else ()


def words(body: Json, key: str) -> list[str]:
    """The texts in the list at ``key``."""
    value = body.get(key)
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def integers(body: Json, key: str) -> list[int]:
    """The whole numbers in the list at ``key``."""
    value = body.get(key)
    items = value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
