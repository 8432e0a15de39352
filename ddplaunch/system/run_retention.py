"""Deletes old run folders: by age and total size, or all but the newest N.

Used by the launcher and, for a node's logs, by the agent, for the default folder, never for ``--log-dir``. Must not
delete a folder of a run that may still be running, or one that ddplaunch did not create.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.system.run_folder import LOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

KEEP_S = 30 * 86400.0
KEEP_BYTES = 5 << 30

_SHORT_RUN_S = 60.0
"""Of runs that are too many, successful ones below this time are deleted first, failed ones last."""

_AGAIN_S = 3600.0
"""Reading the sizes of all files takes time, so it is done only once an hour."""

_STAMP = ".ddplaunch-pruned"

_SAME_RUN_S = 60.0
"""Folders of one name that were created within this time belong to one run."""

_MAX_RUN_S = 30 * 24 * 3600.0

_Run = list[Path]


def prune(base: Path, keep_runs: int | None) -> None:
    """Delete old runs below ``base``, except runs that may still be running. Errors of the disk are ignored.

    ``keep_runs``: keep the newest so many; None: keep those of ``KEEP_S``, up to ``KEEP_BYTES``.
    """
    with contextlib.suppress(OSError):
        if keep_runs is None and not _is_due(base / _STAMP):
            return
        runs = _runs([entry for entry in base.iterdir() if (entry / LOCK).is_file() and not entry.is_symlink()])
        for run in list(_excess(runs)) if keep_runs is None else runs[: max(0, len(runs) - keep_runs)]:
            for folder in run:
                if not _is_in_use(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _is_due(stamp: Path) -> bool:
    """Whether the last time is over ``_AGAIN_S`` ago; then this time is noted."""
    with contextlib.suppress(FileNotFoundError):
        if abs(time.time() - stamp.stat().st_mtime) < _AGAIN_S:
            return False
    with contextlib.suppress(OSError):  # A full disk needs the deletion most.
        stamp.touch(mode=0o600)
    return True


def _excess(runs: list[_Run]) -> Iterator[_Run]:
    """Runs that are too old, then those whose files are too many bytes, the least useful first."""
    kept = []
    for run in runs:
        if time.time() - max(_last_change_s(folder) for folder in run) > KEEP_S:
            yield run
        else:
            kept.append((run, sum(map(_nbytes, run))))
    excess_bytes = sum(nbytes for _, nbytes in kept) - KEEP_BYTES
    if excess_bytes <= 0:
        return
    for run, nbytes in sorted(kept, key=lambda item: _usefulness(item[0])):  # Sorting keeps the oldest first.
        if excess_bytes > 0:
            excess_bytes -= nbytes
            yield run


def _last_change_s(folder: Path) -> float:
    report = folder / "report.json"
    return max(path.stat().st_mtime for path in (folder / LOCK, report) if path == folder / LOCK or path.exists())


def _nbytes(folder: Path) -> int:
    files = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += os.lstat(file).st_size
    return total


def _usefulness(run: _Run) -> int:
    """0 for a short successful run, 1 for another successful one, 2 for a failed one or one without a report."""
    try:
        report = json.loads((run[0] / "report.json").read_bytes())
        if report["outcome"] != "succeeded":
            return 2
        return int(report["duration_s"] >= _SHORT_RUN_S)
    except (OSError, ValueError, TypeError, KeyError):
        return 2


def _runs(folders: list[Path]) -> list[list[Path]]:
    """Folders by run, oldest first. One launcher per node or worker creates many folders of one name within seconds."""
    runs: list[list[Path]] = []
    latest: dict[str, tuple[float, list[Path]]] = {}
    for created_s, folder in sorted(((folder / LOCK).stat().st_mtime, folder) for folder in folders):
        name = re.sub(r"\.([0-9]{1,4}|[0-9a-f]{6})$", "", folder.name)
        before_s, run = latest.get(name, (0.0, []))
        if not run or created_s - before_s > _SAME_RUN_S:
            run = []
            runs.append(run)
        run.append(folder)
        latest[name] = (created_s, run)
    return runs


def _is_in_use(folder: Path) -> bool:
    try:
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)  # NFS locks only files open for writing.
    except OSError:
        return True
    with os.fdopen(fd, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return _may_be_running(folder)
        # On some file systems a lock is visible only on the machine that holds it.
        return not set(lock.read().split()) <= {os.uname().nodename.encode()} and _may_be_running(folder)


def _may_be_running(folder: Path) -> bool:
    """For a run whose lock is not reliable: it is young and has no report."""
    is_young = time.time() - (folder / LOCK).stat().st_mtime < _MAX_RUN_S
    return is_young and not (folder / "report.json").exists()
