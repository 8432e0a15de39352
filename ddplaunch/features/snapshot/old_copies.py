"""Deletes snapshots that nobody needs any more, and what killed commands have left.

Runs in the process of the command.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator

from ddplaunch.features.snapshot.records import MARKER

LINK = "code"
"""In a run folder, a link to its snapshot: as long as it is there, the snapshot is kept."""

PART = ".part-"
"""Begins the name of what is not complete, or is deleted."""

_KEEP_S = 30 * 86400.0
"""So long after its last use, a snapshot is kept that no run folder names: a job may wait for its start."""

_KEEP_PART_S = 86400.0
"""No command copies for so long: it was killed."""


def delete_old(snapshots: str) -> None:
    """Delete the old snapshots of all projects in ``snapshots``, beside which run folders are. Errors are ignored."""
    with contextlib.suppress(OSError):
        used = set(_used(os.path.dirname(snapshots)))
        beside = scan(snapshots)  # Projects, and links of jobs.
        for entry in (each for project in beside if not os.path.islink(project.path) for each in scan(project.path)):
            if entry.is_dir(follow_symlinks=False) and entry.path not in used and _is_old(entry):
                delete(entry.path)
        for link in beside:
            if os.path.islink(link.path) and not os.path.exists(link.path):
                os.unlink(link.path)


def delete(folder: str) -> None:
    """Delete a snapshot. What has the name of a snapshot is whole: it loses the name first. Raises OSError."""
    part = os.path.join(os.path.dirname(folder), f"{PART}{os.urandom(6).hex()}")
    os.rename(folder, part)
    shutil.rmtree(part, ignore_errors=True)


def scan(folder: str) -> list[os.DirEntry[str]]:
    """What is in the folder; nothing if it cannot be read, or is none."""
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def _used(base: str) -> Iterator[str]:
    for run in os.scandir(base):
        for folder in (run.path, *(each.path for each in scan(run.path))):
            with contextlib.suppress(OSError):
                yield os.path.realpath(os.readlink(os.path.join(folder, LINK)))


def _is_old(entry: os.DirEntry[str]) -> bool:
    is_part, marker = entry.name.startswith(PART), os.path.join(entry.path, MARKER)
    last_use_s = os.stat(marker if os.path.exists(marker) and not is_part else entry.path).st_mtime
    return time.time() - last_use_s > (_KEEP_PART_S if is_part else _KEEP_S)
