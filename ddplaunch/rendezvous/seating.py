"""Who takes part in a round, in which order, and which ranks that gives them. Pure."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from ddplaunch.model import Round

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddplaunch.rounds import StoreListens


def seated(seats: Sequence[int], waiting: Iterable[int]) -> list[int]:
    """Who of those that wait had a seat keeps it, newcomers fill the gaps, and gaps that stay are closed."""
    here = set(waiting)
    newcomers = sorted(here.difference(seats))
    kept = []
    for seat in seats:
        if seat in here:
            kept.append(seat)
        elif newcomers:
            kept.append(newcomers.pop(0))
    return [*kept, *newcomers]


def rounds(attempt: int, restarts: int, sizes: Sequence[int], store: StoreListens) -> Iterator[Round]:
    """What each node is told, in the order of their seats; ``sizes`` are their numbers of workers."""
    world_size = sum(sizes)
    for node_rank, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        yield Round(
            attempt=attempt,
            restarts=restarts,
            node_rank=node_rank,
            nnodes=len(sizes),
            first_rank=end - size,
            local_world_size=size,
            world_size=world_size,
            master_addr=store.address,
            master_port=store.port,
        )
