"""Deletes old run folders: by age and total size, or all but the newest N.

Used by the launcher and by agents, for the default folder, never for ``--log-dir``. Must not delete a folder
of a run that may still be running, or one that ddplaunch did not create.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ddplaunch.features.runs import run_json
from ddplaunch.late_dataclass import dataclass
from ddplaunch.system.files import run_folder
from ddplaunch.system.files.run_folder import LOCK, NODES, REPORT

KEEP_S = 30 * 86400.0
KEEP_BYTES = 5 << 30

_SHORT_RUN_S = 60.0
"""Of runs that are too many, successful ones below this time are deleted first, failed ones last."""

_AGAIN_S = 3600.0
"""Reading the sizes of all files takes time, so it is done only once an hour."""

_STAMP = ".ddplaunch-pruned"

_EMPTY_RUN_S = 3600.0
"""So long, the folder of a run whose launchers have no folder in it yet is not deleted."""

_MAX_RUN_S = 30 * 24 * 3600.0


@dataclass(frozen=True)
class _Run:
    """A run folder, and the folders of its launchers: itself, or those in it if each node has a launcher."""

    folder: Path
    launchers: tuple[Path, ...]

    @property
    def reports(self) -> tuple[Path, ...]:
        return tuple(folder / REPORT for folder in self.launchers)

    @property
    def locks(self) -> tuple[Path, ...]:
        return tuple(folder / LOCK for folder in self.launchers) or (self.folder / NODES,)

    @property
    def created_s(self) -> float:
        return min(path.stat().st_mtime for path in self.locks)

    @property
    def changed_s(self) -> float:
        return max(path.stat().st_mtime for path in (*self.locks, *filter(os.path.exists, self.reports)))


def prune(base: Path, keep_runs: int | None) -> None:
    """Delete old runs below ``base``, except runs that may still be running. Errors of the disk are ignored.

    A run of several launchers is deleted as a whole, when none of them may still be running.

    ``keep_runs``: keep the newest so many; None: keep those of ``KEEP_S``, up to ``KEEP_BYTES``.
    """
    with contextlib.suppress(OSError):
        if keep_runs is None and not _is_due(base / _STAMP):
            return
        runs = sorted(_runs(base), key=lambda run: run.created_s)
        for run in list(_excess(runs)) if keep_runs is None else runs[: max(0, len(runs) - keep_runs)]:
            if not _is_in_use(run):
                shutil.rmtree(run.folder, ignore_errors=True)


def _runs(base: Path) -> Iterator[_Run]:
    for folder in base.iterdir():
        launchers = run_json.of_launchers(folder)
        if launchers or (run_json.has_launchers(folder) and run_folder.is_own(folder)):
            yield _Run(folder, launchers)


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
        if time.time() - run.changed_s > KEEP_S:
            yield run
        else:
            kept.append((run, _nbytes(run.folder)))
    excess_bytes = sum(nbytes for _, nbytes in kept) - KEEP_BYTES
    if excess_bytes <= 0:
        return
    for run, nbytes in sorted(kept, key=lambda item: _usefulness(item[0])):  # Sorting keeps the oldest first.
        if excess_bytes > 0:
            excess_bytes -= nbytes
            yield run


def _nbytes(folder: Path) -> int:
    files = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += os.lstat(file).st_size
    return total


def _usefulness(run: _Run) -> int:
    """0 for a short successful run, 1 for another successful one, 2 for a failed one or one without a report."""
    return max(map(_usefulness_by, run.reports), default=2)


def _usefulness_by(report_path: Path) -> int:
    report = run_json.read(report_path) or {}
    duration_s = run_json.number(report, "duration_s")
    if report.get("outcome") != "succeeded" or duration_s is None:
        return 2
    return int(duration_s >= _SHORT_RUN_S)


def _is_in_use(run: _Run) -> bool:
    if not run.launchers:
        return time.time() - run.created_s < _EMPTY_RUN_S
    return any(map(_may_have_launcher, run.launchers))


def _may_have_launcher(folder: Path) -> bool:
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
    return is_young and not os.path.exists(folder / REPORT)
