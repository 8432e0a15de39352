"""Packs the times of collectives for the way from an agent to the launcher, and unpacks them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.features.hangs.records import CollectiveTimes
from ddplaunch.features.slow_ranks.records import NO_TIME, PackedTimes

if TYPE_CHECKING:
    from collections.abc import Iterator


def pack(times: CollectiveTimes) -> PackedTimes:
    """``times`` to the microsecond. It has at least one call, and at most ``MAX_SENT``."""
    first_ns = next((ns for ns in times.created_ns if ns > 0), 0)
    return PackedTimes(times.rank, times.group, times.first_number, first_ns, ",".join(_gaps(times, first_ns)))


def _gaps(times: CollectiveTimes, last_ns: int) -> Iterator[str]:
    for ns in times.created_ns:
        if ns <= 0:
            yield NO_TIME
            continue
        gap_us = max(0, ns - last_ns) // 1000  # Negative where the clock was set back.
        last_ns += gap_us * 1000  # Not ns: the rounding would add up.
        yield str(gap_us)


def unpack(packed: PackedTimes, host: str) -> CollectiveTimes:
    """The times that were packed; ``host`` is that of the node that sent them."""
    created, now = [], packed.first_ns
    for gap in packed.gaps_us.split(","):
        now += 0 if gap == NO_TIME else int(gap) * 1000
        created.append(0 if gap == NO_TIME else now)
    return CollectiveTimes(packed.rank, host, packed.group, packed.first_number, tuple(created))
