"""Reads the JSON files of run folders: run.json and report.json, which may be damaged, cut, or of another version.

Used by the commands that read run folders, and by the agent of ``--ps``. Must not block, and must not raise for any
content of a file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplaunch.system.files import kept_files
from ddplaunch.system.files.run_folder import LOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN, REPORT = "run.json", "report.json"

_MAX_BYTES = 256 << 20
"""A report of ten thousand workers, each with its last lines, has some tens of MB."""


def read(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if it is no regular file, cannot be read, or holds anything else."""
    with contextlib.suppress(OSError, ValueError, RecursionError, MemoryError), kept_files.open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= _MAX_BYTES:
            body = json.loads(file.read(_MAX_BYTES))
            return body if isinstance(body, dict) else None
    return None


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
