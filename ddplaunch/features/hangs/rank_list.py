"""Many ranks as a short text: ``0-2047``, or ``3-2043/8`` for every eighth.

Each rank's evidence names the members of its process groups, often all ranks of the job: as numbers, the evidence of a
large job would grow with the square of its ranks. Used by agents and the launcher. Pure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Annotated

from ddplaunch.protocol.field_types import Limit

MAX_RANKS = 1 << 17
_MAX_RANK = 1 << 24
_PART = re.compile(r"([0-9]{1,8})(?:-([0-9]{1,8})(?:/([0-9]{1,8}))?)?")


def fold(ranks: Sequence[int]) -> str:
    """The text of ``ranks``, in their order; empty if there are none. Equal ranks have equal texts."""
    parts, begin = [], 0
    while begin < len(ranks):
        end = _end_of_run(ranks, begin)
        parts.append(_part(ranks[begin], ranks[end - 1], end - begin))
        begin = end
    return ",".join(parts)


def _end_of_run(ranks: Sequence[int], begin: int) -> int:
    """The index after the ranks from ``begin`` on that grow by one step; after ``begin`` if these are two or fewer."""
    end = begin + 2
    step = ranks[begin + 1] - ranks[begin] if end <= len(ranks) else 0
    while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
        end += 1
    return end if end - begin > 2 else begin + 1


def _part(first: int, last: int, count: int) -> str:
    if count == 1:
        return str(first)
    step = (last - first) // (count - 1)
    return f"{first}-{last}" + (f"/{step}" if step > 1 else "")


@functools.lru_cache(64)
def unfold(text: str) -> tuple[int, ...]:
    """The ranks in a text of ``fold``. Callers share the tuple.

    Raises:
        ValueError: it is no such text, or it has more than ``MAX_RANKS``.
    """
    ranges = [_range(part) for part in text.split(",")] if text else []
    if sum(map(len, ranges)) > MAX_RANKS:
        raise ValueError("too many ranks")
    return tuple(rank for each in ranges for rank in each)


def _range(part: str) -> range:
    found = _PART.fullmatch(part)
    if not found:
        raise ValueError(f"no ranks: {part[:80]!r}")
    first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
    if not first <= last <= _MAX_RANK or not step:
        raise ValueError(f"no ranks: {part!r}")
    return range(first, last + 1, step)


def _is_rank_list(text: str) -> bool:
    try:
        unfold(text)
    except ValueError:
        return False
    return True


RankList = Annotated[str, Limit(f"at most {MAX_RANKS} ranks, like 0-7 or 3-59/8", _is_rank_list)]
"""A text of ``fold``."""
