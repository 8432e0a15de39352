"""How much an attempt's end tells of its workers: what explains a failure, within what one record may hold. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch import verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from ddplaunch.model import StreamName, WorkerExit

_TOLD_CHARS = 2 << 20
"""Of all workers' errors and last lines: an attempt's end is one record, and JSON needs up to 12 bytes for each."""

_SHORT_CHARS = 200

_TAIL_LINES, _SHORT_TAIL_LINES = 200, 20
"""Of a worker that failed by itself, and of others."""


def cut(exits: Sequence[WorkerExit]) -> tuple[WorkerExit, ...]:
    """``exits``, with what they say only as far as ``_TOLD_CHARS`` reach; the likely causes of a failure come first."""
    left = _TOLD_CHARS
    kept: dict[int, WorkerExit] = {}
    for exit_ in (*verdict.failures(exits), *exits):
        if exit_.rank not in kept:
            error = exit_.error
            chars = sum(map(len, exit_.tail)) + (len(error.message) + len(error.traceback) if error else 0)
            if chars > left:
                short = error and replace(error, message=error.message[:_SHORT_CHARS], traceback="")
                exit_ = replace(exit_, error=short, tail=())
            left -= min(chars, left)
            kept[exit_.rank] = exit_
    return tuple(kept[exit_.rank] for exit_ in exits)


def log_to_read(folder: Path | None, logged: Collection[StreamName]) -> str | None:
    """The file to look at first; None where none is kept."""
    return f"{folder}/{'stderr' if 'stderr' in logged else 'stdout'}.log" if folder and logged else None


def last_lines(tails: Mapping[StreamName, bytes], *, is_needed: bool) -> tuple[str, ...]:
    """Of what a worker wrote at its end: lines of stderr, or of stdout where stderr is empty; fewer unless needed."""
    text = tails.get("stderr") or tails.get("stdout") or b""
    lines = text.decode("utf-8", "replace").splitlines()
    return tuple(line for line in lines if line.strip())[-_TAIL_LINES if is_needed else -_SHORT_TAIL_LINES :]
