"""Reads the JSON files of run folders, which may be damaged, cut, or of another version: the objects and their values.

Used by all that read run folders: commands, the page, the agent of ``--ps``. Must not block, and must not raise for any
content of a file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplaunch.system.files import kept_files
from ddplaunch.system.files.run_folder import LOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN, REPORT = "run.json", "report.json"

Json = dict[str, Any]
_MAX_BYTES = 256 << 20
"""A report of ten thousand workers, each with its last lines, has some tens of MB."""


def read(path: Path) -> dict[str, Any] | None:
    """The object in a file; None if it is no regular file, cannot be read, or holds anything else."""
    with contextlib.suppress(OSError, ValueError, RecursionError, MemoryError), kept_files.open_regular(path) as file:
        if os.fstat(file.fileno()).st_size <= _MAX_BYTES:
            body = json.loads(file.read(_MAX_BYTES))
            return body if isinstance(body, dict) else None
    return None


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


def seconds(body: Json, key: str) -> float | None:
    """The time at ``key``, an ISO 8601 text, in seconds since 1970; None for anything else."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromisoformat(text(body, key)).timestamp()
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


def of_launcher(pid: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and run.json of every run whose lock process ``pid`` holds; none if its descriptors may not be read."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{fd}")
                if target.endswith(f"/{LOCK}") and (body := read(Path(target).with_name(RUN))):
                    yield Path(target).parent, body
