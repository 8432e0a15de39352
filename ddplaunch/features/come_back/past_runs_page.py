"""Table of ``--ps --all``: one line per run, cut to the width of a terminal. Pure; runs in the user's process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import elapsed, quote, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RUNNING, KILLED = "running", "killed"
NO_REPORT, DAMAGED = "no report", "damaged"
"""``PastRun.result`` where it cannot be known how the run ended."""

_HEAD = ("run", "start", "duration", "result", "command", "first cause")
_SEPARATOR = 2
_LEAST_ROOM, _LEAST_COMMAND = 48, 12
_MAX_CELL = 1000


@dataclass(frozen=True)
class PastRun:
    """A run that has left a run folder.

    Attributes:
        start_s: start, in seconds since 1970; 0 if it is not known.
        duration_s: duration up to the end, or up to now; None if it is not known.
        result: ``exit`` and the exit code, or one of the words of this module.
        command: the command line, quoted for a shell; empty if it is not known.
        cause: first failure, or another reason why the run did not succeed; empty if there is none.
    """

    run_id: str
    start_s: float
    duration_s: float | None
    result: str
    command: str
    cause: str


def run_table(runs: Sequence[PastRun], columns: int | None) -> str:
    """One line per run, of at most ``columns`` characters; None: lines are not cut.

    On a narrow terminal the causes are in lines of their own.
    """
    rows = list(map(row, runs))
    if columns is None:
        return "\n".join(table([_HEAD, *rows]))
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    room = columns - sum(widths[:-2]) - _SEPARATOR * (len(widths) - 1)
    lines = _narrow(rows, room) if room < _LEAST_ROOM else table(_fitted([_HEAD, *rows], room, *widths[-2:]))
    return "\n".join(_cut(line, columns) for line in lines)


def _narrow(rows: Sequence[tuple[str, ...]], room: int) -> Iterator[str]:
    """Lines with a cause in an indented line below its run."""
    command = max(_LEAST_COMMAND, room + _SEPARATOR)
    cut = [(*row[:-2], _cut(row[-2], command)) for row in rows]
    head, *lines = table([_HEAD[:-1], *cut])
    yield head
    for line, row in zip(lines, rows, strict=True):
        yield line
        if row[-1]:
            yield f"  {row[-1]}"


def row(run: PastRun) -> tuple[str, ...]:
    """The cells of a run, escaped."""
    duration = "?" if run.duration_s is None else elapsed(run.duration_s)
    cells = (run.run_id, _moment(run.start_s), duration, run.result, run.command or "?", run.cause)
    return tuple(quote(cell, _MAX_CELL) for cell in cells)


def _moment(time_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s)) if time_s else "?"
    except (ValueError, OverflowError, OSError):  # A file may name any time.
        return "?"


def _fitted(rows: Sequence[tuple[str, ...]], room: int, command: int, cause: int) -> list[tuple[str, ...]]:
    """``rows`` whose last two cells together have at most ``room`` characters; the arguments are their widths.

    The cause gets what it needs, up to half of the room or what the command leaves.
    """
    cause = min(cause, max(room // 2, room - command))
    return [(*row[:-2], _cut(row[-2], room - cause), _cut(row[-1], cause)) for row in rows]


def _cut(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 3]}..."
