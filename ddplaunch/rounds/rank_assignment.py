"""Rank assignment: the order of the nodes in a round, and the ranks of their workers.

Runs in the coordinator's process. Pure.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from ddplaunch.protocol.results import Round

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddplaunch.protocol.rendezvous import WorkersStoreListens


def in_rank_order(previous: Sequence[int], waiting: Iterable[int]) -> list[int]:
    """The waiting nodes in rank order.

    A node of the previous round keeps its position. New nodes, by index, get the positions of missing nodes; positions
    without a node are removed.
    """
    present = set(waiting)
    newcomers = sorted(present.difference(previous))
    order = []
    for index in previous:
        if index in present:
            order.append(index)
        elif newcomers:
            order.append(newcomers.pop(0))
    return [*order, *newcomers]


def rounds_by_node(attempt: int, restarts: int, sizes: Sequence[int], store: WorkersStoreListens) -> Iterator[Round]:
    """The Round of each node, in rank order; ``sizes`` are the nodes' numbers of workers."""
    world_size = sum(sizes)
    for node_rank, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        yield Round(
            attempt=attempt,
            restart_count=restarts,
            node_rank=node_rank,
            nnodes=len(sizes),
            first_rank=end - size,
            local_world_size=size,
            world_size=world_size,
            master_addr=store.address,
            master_port=store.port,
        )
