"""Text of messages: escaped and quoted foreign text, plurals, tables, ranges of numbers, sizes, run and device ids.

Used in every process. Pure: reads nothing, prints nothing, imports nothing of ddplaunch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_UNITS = ((30, "GB"), (20, "MB"), (10, "kB"))

_CUT = "…[cut]"
_MAX_CELL = 1000
_MAX_NAME_BYTES = 255
"""Of a name in a folder, on Linux (NAME_MAX)."""

_SECRET_NAME = (
    r"([\w.-]*[._-])?((api|access|secret|private)[_-]?key|(?-i:KEY)|token|secret|pass|password|passwd|pwd|pat|"
    r"passphrase|credentials?|auth|authorization|oauth2?|dsn|cookie|webhook)"
)

_TIME = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|min|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

DEVICE_ID = r"(?:[0-9]{1,5}|(?:GPU|MIG)-[0-9A-Za-z/-]+)"
"""Regular expression for a GPU's index or UUID, as CUDA_VISIBLE_DEVICES takes them."""

FREE_GPUS = r"free(?::([1-9][0-9]{0,2}))?"
"""Regular expression for GPUs that nobody uses: ``free:2``, or ``free``."""


def escape(text: str) -> str:
    """``text`` with all control characters except line ends and tabs escaped: it cannot steer the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


KEEPER_ID = "warm"
"""Stands for what --keep-warm has left where a run is named: ``--kill warm``. No run has this id."""


def is_run_id(text: str) -> bool:
    """Whether ``text`` can be a run id: it names a folder, and is a part of the run tag."""
    return bool(re.fullmatch(r"(?!\.)[\w.:@+-]{1,128}", text, re.ASCII))


def is_folder_name(text: str) -> bool:
    """Whether ``text`` is one component of a path, of a length that file systems take: no slash, not ``..``."""
    is_short = 0 < len(text.encode("utf-8", "surrogateescape")) <= _MAX_NAME_BYTES
    return is_short and text.isprintable() and "/" not in text and text not in (".", "..")


def quote(text: str, limit: int = 80) -> str:
    """``text`` for use inside a message: escaped, on one line, cut after ``limit`` characters."""
    start = escape(text[:limit]).replace("\n", r"\n").replace("\t", r"\t")
    return start + ("..." if len(text) > limit else "")


def masked(words: Sequence[str]) -> tuple[str, ...]:
    """A command line to be shown or kept: values of options like ``--api-key``, and logins in URLs, are masked."""
    shown: list[str] = []
    for word in words:
        name, equals, _ = word.partition("=")
        is_value = bool(shown) and not word.startswith("-") and shown[-1].startswith("-") and _is_secret(shown[-1])
        shown.append("***" if is_value else f"{name}=***" if equals and _is_secret(name) else without_login(word))
    return tuple(shown)


def without_login(text: str) -> str:
    """``text``, in which user and password of a URL are masked."""
    return re.sub(r"://[^\s/?#]+@", "://***@", text) if "://" in text else text


def _is_secret(name: str) -> bool:
    """Of an option, of a variable, or of a setting like ``wandb.api_key``; not ``--max-tokens`` or ``--sort-key``."""
    return bool(re.fullmatch(_SECRET_NAME, name, re.IGNORECASE))


def cut(text: str, longest: int) -> str:
    """``text``, or its begin with a mark: at most ``longest`` characters."""
    return text if len(text) <= longest else text[: longest - len(_CUT)] + _CUT


def local_time(time_s: float, form: str) -> str:
    """The local time of ``time_s`` seconds since 1970, as ``time.strftime``; empty if no date is so far away."""
    try:
        return time.strftime(form, time.localtime(time_s))
    except (ValueError, OverflowError, OSError):  # A file or another process may say any time.
        return ""


def clock(time_s: float) -> str:
    """The local time of day, with milliseconds, of ``time_s`` seconds since 1970."""
    time_of_day = local_time(time_s, "%H:%M:%S")
    return f"{time_of_day}.{int(time_s % 1 * 1000):03d}" if time_of_day else "an unknown time"


def iso_time(time_s: float) -> str:
    """Local date and time, with milliseconds and zone, of ``time_s`` seconds since 1970: ISO 8601."""
    local = time.localtime(time_s)
    zone = time.strftime("%z", local)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', local)}.{int(time_s % 1 * 1000):03d}{zone[:3]}:{zone[3:]}"


def plural(count: int, noun: str) -> str:
    """``1 node``, ``3 nodes``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row; columns are left-aligned and two spaces apart. All rows have equally many cells.

    Control characters in cells are escaped.
    """
    cells = [[quote(cell, _MAX_CELL) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def fold_ints(numbers: Iterable[int]) -> str:
    """Sorted numbers as ranges: ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranks(numbers: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-2, 5``."""
    text = fold_ints(numbers)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def size(count: float) -> str:
    """``count`` bytes with at least two digits, in the largest unit that has them: ``999 B``, ``5.0 MB``."""
    for bits, unit in _UNITS:
        if count >= 10 << bits:
            return f"{count / (1 << bits):.0f} {unit}"
        if count >= 1 << bits:
            return f"{count / (1 << bits):.1f} {unit}"
    return f"{count:.0f} B"


def seconds(text: str) -> float | None:
    """The seconds of a time with units, like ``500ms``, ``5m`` or ``1h30m``; None for any other text."""
    if not re.fullmatch(f"(?:{_TIME.pattern})+", text):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in _TIME.findall(text))


def duration(duration_s: float) -> str:
    """``12 s``, ``3 min 20 s``, ``1 h 3 min``, ``2 d 5 h``: at most two units."""
    for unit, length, lower, lower_length in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if duration_s >= length:
            rest = int(duration_s % length // lower_length)
            return f"{duration_s // length:.0f} {unit}" + (f" {rest} {lower}" if rest else "")
    return f"{duration_s:.0f} s"


def elapsed(duration_s: float) -> str:
    """A duration for a table: ``12s``, ``1m33s``, ``2h05m``, ``3d07h``."""
    for unit, length, lower, lower_length in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if duration_s >= length:
            return f"{duration_s // length:.0f}{unit}{int(duration_s % length // lower_length):02d}{lower}"
    return f"{max(0.0, duration_s) // 1:.0f}s"


def is_device_id(text: str) -> bool:
    """Whether ``text`` can be the index or UUID of a GPU."""
    return bool(re.fullmatch(DEVICE_ID, text))


def free_gpus(gpus: Sequence[str] | None) -> int | None:
    """How many GPUs ``--gpus free:2`` wants that nobody uses; 0 for ``free`` alone; None for ids, or without any."""
    found = re.fullmatch(FREE_GPUS, gpus[0]) if gpus else None
    return int(found[1] or 0) if found else None


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """The values of each key, both in the order in which they come: what is alike is told in one line."""
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def median(numbers: Iterable[float]) -> float:
    """The middle of at least one number. Python's own is in a module that takes 10 ms to load."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[-1 - middle]) / 2
