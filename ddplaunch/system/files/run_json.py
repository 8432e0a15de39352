"""Reads the JSON files of run folders: run.json and report.json, which may be damaged, cut, or of another version.

Used by the commands that read run folders, and by the agent of ``--ps``. Must not block, and must not raise for any
content of a file.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ddplaunch.system.files.run_folder import LOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN, REPORT = "run.json", "report.json"

_MAX_BYTES = 256 << 20
"""A report of ten thousand workers, each with its last lines, has some tens of MB."""


def read(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if it is no regular file, cannot be read, or holds anything else."""
    with contextlib.suppress(OSError, ValueError, RecursionError, MemoryError), open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= _MAX_BYTES:
            body = json.loads(file.read(_MAX_BYTES))
            return body if isinstance(body, dict) else None
    return None


def open_regular(path: Path) -> BinaryIO:
    """The file, open for reading.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    # O_NONBLOCK: opening a FIFO without a writer would block.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is no regular file")
    return os.fdopen(fd, "rb")


def text(body: dict[str, Any], key: str) -> str:
    """The text at ``key``; empty if there is none."""
    value = body.get(key)
    return value if isinstance(value, str) else ""


def number(value: object) -> float | None:
    """``value`` if it is a finite number; None for anything else."""
    with contextlib.suppress(OverflowError):  # JSON has integers that no float can hold.
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def of_launcher(pid: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and run.json of every run whose lock process ``pid`` holds; none if its descriptors may not be read."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{fd}")
                if target.endswith(f"/{LOCK}") and (body := read(Path(target).with_name(RUN))):
                    yield Path(target).parent, body
