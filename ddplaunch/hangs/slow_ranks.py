"""Which rank is last in the collectives of a job, how often, and what it costs.

The times are of calls, not of ends, so this sees ranks that are late on the CPU. On a GPU the calls of a rank run ahead
of its kernels: a slow GPU shows only where the script waits for it in each step.

Clocks of two hosts are never compared as they are. The difference of two clocks is taken so that the first ranks of
both hosts call at the same time in the middle of all calls. It is then moved into the limits that the calls themselves
prove: no rank calls the next collective before all ranks have called this one. So a rank that is later than the others
of its host is always found; a host all of whose ranks are late only by the part that the limits prove.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddplaunch.text import quote, ranks, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ddplaunch.protocol.hang_evidence import CollectiveTimes

MIN_COLLECTIVES = 200
MIN_DELAYED = 100
MIN_LAST_SHARE = 0.6
MIN_COST_SHARE = 0.05
"""``warning`` names a rank after so many collectives, so many of them delayed, if it is the last in more than this
share of the delayed ones, and costs this share of the time more than any other: ranks that are even but vary all cost
something."""

MAX_TIMES_TOTAL = 1 << 20
"""Of a process group as many collectives are looked at as have so many times together, the newest."""

_MAX_LAG = 64
_TRIMMED = 0.02
"""Share of the calls that may contradict a limit: a clock was set, or a call is not one in which all ranks wait."""

_LEAST_SPREAD = 0.2
"""A collective matters if its first and last rank are apart by this share of what is usual in the slowest tenth."""

Arrivals = dict[int, float]
"""Time in seconds at which each rank called one collective."""


@dataclass(frozen=True)
class RankLateness:
    """How late a rank calls collectives.

    Attributes:
        collectives: number of collectives of all its process groups that were looked at.
        delayed: number of those in which ranks waited noticeably for each other.
        last: number of the delayed ones in which it was the last to call.
        median_s, p95_s: seconds that it was behind the middle of all ranks, where it was the last.
        cost_share: share of the time for which the job waited for this rank only.
    """

    rank: int
    host: str
    collectives: int
    delayed: int
    last: int
    median_s: float
    p95_s: float
    cost_share: float

    @property
    def last_share(self) -> float:
        """Share of the delayed collectives in which it was the last."""
        return self.last / self.delayed


def rank_lateness(times: Iterable[CollectiveTimes]) -> tuple[RankLateness, ...]:
    """The lateness of each rank, the most expensive first; of at least two ranks, or empty."""
    times = list(times)
    hosts = {each.rank: each.host for each in times}
    late: defaultdict[int, list[float]] = defaultdict(list)
    seen: defaultdict[int, int] = defaultdict(int)
    delayed: defaultdict[int, int] = defaultdict(int)
    cost: defaultdict[int, float] = defaultdict(float)
    for created in _by_group(times):
        arrivals = _on_one_clock(_common(created), hosts)
        for at in _with_waiting(arrivals):
            last = max(at, key=lambda rank: at[rank])
            late[last].append(at[last] - statistics.median(at.values()))
            for rank in at:
                delayed[rank] += 1
        for rank in created:
            seen[rank] += len(arrivals)
        for rank, cost_s in _costs(arrivals):
            cost[rank] += cost_s
    total_s = _duration_s(times)
    found = (
        _lateness((rank, hosts[rank], seen[rank], delayed[rank]), late[rank], cost[rank] / total_s)
        for rank in sorted(delayed)
    )
    return tuple(sorted(found, key=lambda each: -each.cost_share))


def warning(lateness: Sequence[RankLateness]) -> str:
    """One sentence about a rank that slows the job down; empty if there is none."""
    if not lateness:
        return ""
    first, second = lateness[0], lateness[1]
    is_enough = first.collectives >= MIN_COLLECTIVES and first.delayed >= MIN_DELAYED
    if not is_enough or first.last_share <= MIN_LAST_SHARE or first.cost_share - second.cost_share <= MIN_COST_SHARE:
        return ""
    return (
        f"{ranks([first.rank])} on {quote(first.host)} is the last in {first.last_share:.0%} of {first.delayed} "
        f"delayed collectives, typically by {_milliseconds(first.median_s)}: the job waits for it "
        f"{first.cost_share:.0%} of the time"
    )


def lateness_table(lateness: Sequence[RankLateness], limit: int = 8) -> list[str]:
    """Lines of a table of the ranks that cost the most."""
    head = ("rank", "host", "last in", "behind (median)", "behind (p95)", "cost")
    return table([head, *(_row(each) for each in lateness[:limit])])


def _row(each: RankLateness) -> tuple[str, ...]:
    last = f"{each.last_share:.0%} of {each.delayed}"
    return str(each.rank), each.host, last, *map(_milliseconds, (each.median_s, each.p95_s)), f"{each.cost_share:.1%}"


def _milliseconds(duration_s: float) -> str:
    return f"{duration_s * 1000:.1f} ms"


def _lateness(counts: tuple[int, str, int, int], late: list[float], share: float) -> RankLateness:
    ordered = sorted(late) or [0.0]
    p95 = ordered[int(0.95 * (len(ordered) - 1))]
    return RankLateness(*counts, len(late), statistics.median(ordered), p95, min(share, 1.0))


def _by_group(times: Iterable[CollectiveTimes]) -> Iterator[dict[int, dict[int, int]]]:
    """Of each process group that several ranks know: the times of each rank by number."""
    groups: defaultdict[str, dict[int, dict[int, int]]] = defaultdict(dict)
    for each in times:
        created = groups[each.group].setdefault(each.rank, {})
        created.update({number: ns for number, ns in enumerate(each.created_ns, each.first_number) if ns > 0})
    return (by_rank for by_rank in groups.values() if len(by_rank) > 1)


def _common(by_rank: dict[int, dict[int, int]]) -> list[Arrivals]:
    """The newest collectives that all ranks have called, oldest first."""
    numbers = sorted(set.intersection(*(set(created) for created in by_rank.values())))
    numbers = numbers[-max(MAX_TIMES_TOTAL // len(by_rank), 1) :]
    start = min((by_rank[min(by_rank)][number] for number in numbers), default=0)
    return [{rank: (created[number] - start) / 1e9 for rank, created in by_rank.items()} for number in numbers]


def _with_waiting(arrivals: list[Arrivals]) -> list[Arrivals]:
    """Those in which ranks wait for each other for a time that matters.

    Where a step has several collectives, all ranks come to the second together, from the end of the first.
    """
    spreads = [max(at.values()) - min(at.values()) for at in arrivals]
    if not spreads:
        return []
    least = _quantile(spreads, 0.9) * _LEAST_SPREAD
    return [at for at, spread in zip(arrivals, spreads, strict=True) if spread >= least]


def _on_one_clock(arrivals: list[Arrivals], hosts: dict[int, str]) -> list[Arrivals]:
    """The same times, all by the clock of the host of the lowest rank."""
    if not arrivals:
        return []
    members: defaultdict[str, list[int]] = defaultdict(list)
    for rank in sorted(arrivals[0]):
        members[hosts[rank]].append(rank)
    reference, *others = members.values()
    offsets = {rank: offset for own in others for offset in [_offset_s(arrivals, reference, own)] for rank in own}
    return [{rank: time - offsets.get(rank, 0.0) for rank, time in at.items()} for at in arrivals]


def _offset_s(arrivals: list[Arrivals], reference: list[int], own: list[int]) -> float:
    """Seconds by which the clock of the ranks ``own`` is ahead of that of ``reference``."""
    first_own, last_own = _each(arrivals, own, min), _each(arrivals, own, max)
    first_ref, last_ref = _each(arrivals, reference, min), _each(arrivals, reference, max)
    typical = statistics.median(own - ref for own, ref in zip(first_own, first_ref, strict=True))
    lag = 1
    while lag <= min(_MAX_LAG, len(arrivals) - 1):  # Calls may overlap: each waits for one that is some calls earlier.
        least = _quantile([own - ref for own, ref in zip(last_own, first_ref[lag:])], 1 - _TRIMMED)  # noqa: B905
        most = _quantile([own - ref for own, ref in zip(first_own[lag:], last_ref)], _TRIMMED)  # noqa: B905
        if least <= most:
            return min(max(typical, least), most)
        lag *= 2
    return typical


def _each(arrivals: list[Arrivals], members: list[int], choose: Callable[[Iterable[float]], float]) -> list[float]:
    return [choose(at[rank] for rank in members) for at in arrivals]


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def _costs(arrivals: list[Arrivals]) -> Iterator[tuple[int, float]]:
    """For each series of calls that overlap: the rank that came last, and the seconds that it came after the second.

    In a series ranks call without waiting for each other. A delay is then seen in every call, and costs once.
    """
    worst: tuple[int, float] | None = None
    end = 0.0
    for at in arrivals:
        second, last = sorted(at, key=lambda rank: at[rank])[-2:]
        if worst and min(at.values()) >= end:
            yield worst
            worst = None
        cost = (last, at[last] - at[second])
        worst = max(worst or cost, cost, key=lambda each: each[1])
        end = at[last]
    if worst:
        yield worst


def _duration_s(times: Iterable[CollectiveTimes]) -> float:
    """The time between the first and the last call, by the clock of one rank."""
    spans: dict[int, tuple[int, int]] = {}
    for each in times:
        created = [ns for ns in each.created_ns if ns > 0]
        if created:
            first, last = spans.get(each.rank, (created[0], created[0]))
            spans[each.rank] = (min(first, *created), max(last, *created))
    return max((last - first for first, last in spans.values()), default=0) / 1e9 or 1.0
