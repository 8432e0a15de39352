"""Treats a host as one rank, to find a host of which all ranks are late. Pure; ``slow_ranks`` counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def are_comparable(members: Iterable[int], hosts: Mapping[int, str]) -> bool:
    """Whether these ranks are on several hosts, and one of these has several of them."""
    counts = Counter(hosts[rank] for rank in members)
    return len(counts) > 1 and max(counts.values()) > 1


def by_host(arrivals: Iterable[Mapping[int, float]], hosts: Mapping[int, str]) -> list[dict[int, float]]:
    """Of each collective the time of each host, under its lowest rank.

    A host of which all ranks come after all others has the time of its first rank, so it is as late as the job waits
    for the whole host; all others have that of the last rank elsewhere. If there is no such host, all are equal.
    """
    return [_of_call(at, hosts) for at in arrivals]


def _of_call(at: Mapping[int, float], hosts: Mapping[int, str]) -> dict[int, float]:
    times: defaultdict[str, list[float]] = defaultdict(list)
    lowest: dict[str, int] = {}
    for rank in sorted(at):
        times[hosts[rank]].append(at[rank])
        lowest.setdefault(hosts[rank], rank)
    late = max(times, key=lambda host: min(times[host]))
    others = max(max(found) for host, found in times.items() if host != late)
    first = max(others, min(times[late]))
    return {rank: first if host == late else others for host, rank in lowest.items()}
