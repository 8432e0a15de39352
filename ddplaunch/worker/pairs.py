"""Who talks to whom, so that all talk at a time and each to one other: the first turns of a tournament. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TURNS = 3


def partners(rank: int, world: int) -> Iterator[int]:
    """Whom ``rank`` talks to, turn by turn: in each turn all are in pairs, and -1 sits out of an odd number."""
    circle = world - 1 + world % 2
    for turn in range(min(TURNS, circle)):
        alone = turn * (circle + 1) // 2 % circle
        if rank == circle:
            yield alone
        elif rank == alone:
            yield circle if circle < world else -1
        else:
            yield (turn - rank) % circle
