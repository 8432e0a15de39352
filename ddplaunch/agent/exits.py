"""How much an attempt's end tells of its workers: what explains a failure, within what one record may hold. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch import verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.model import WorkerExit

_TOLD_CHARS = 2 << 20
"""Of all workers' errors and last lines: an attempt's end is one record, and JSON needs up to 12 bytes for each."""

_SHORT_CHARS = 200


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
