"""Which rank is last in the collectives of a job, how often, and what it costs.

The times are of calls, not of ends, so this sees ranks that are late on the CPU. On a GPU the calls of a rank run ahead
of its kernels: a slow GPU shows only where the script waits for it in each step.

The clocks of two hosts differ, and this module estimates the difference from the calls. It assumes that the first ranks
of both hosts call at the same time, on the median of all calls. It then moves the estimate into limits that the calls
prove: no rank calls the next collective before all ranks have called the present one. A rank that is later than the
other ranks of its host is therefore always found. If all ranks of a host are late, the limits may be too wide to show
it. ``ClockLimits`` narrows them: a host reads its clock after the launcher has sent a question and before the launcher
has the answer.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ddplaunch.protocol.run_result import RankLateness
from ddplaunch.text import grouped, median, quote, ranks, table

if TYPE_CHECKING:
    from ddplaunch.features.slow_ranks.records import CollectivesSampled

MIN_COLLECTIVES = 200
MIN_DELAYED = 100
MIN_LAST_SHARE = 0.6
MIN_COST_SHARE = 0.05
"""``warning`` names a rank after so many collectives, so many of them delayed, if it is the last in more than this
share of the delayed ones, and costs this share of the time more than any other: ranks that are even but vary all cost
something."""

MAX_TIMES_TOTAL = 1 << 20
"""Of a process group as many collectives are looked at as have so many times together, the newest."""

_MAX_BEHIND = 1000
"""The median is that of the newest collectives, so that a run of weeks does not need more memory."""

_MAX_SHOWN = 8
_MAX_LAG = 64
_TRIMMED = 0.02
"""Share of the calls that may contradict a limit: a clock was set, or a call is not one in which all ranks wait."""

_LEAST_SPREAD = 0.2
"""A collective matters if its first and last rank are apart by this share of what is usual in the slowest tenth."""

Arrivals = dict[int, float]
"""Time in seconds at which each rank called one collective."""

_Key = tuple[int, str]
"""A rank and its host; of a host its lowest rank."""

ClockLimits = tuple[int, int]
"""How far a host's clock is ahead of the launcher's: at least and at most, in nanoseconds."""


class LatenessCounts:
    """How late the ranks, or the hosts, called the collectives of the samples that are added up here."""

    def __init__(self) -> None:
        self.samples = 0
        self.duration_s = 0.0
        """Between the first and the last call of each sample."""
        self._seen: Counter[_Key] = Counter()
        self._delayed: Counter[_Key] = Counter()
        self._last: Counter[_Key] = Counter()
        self._cost_s: defaultdict[_Key, float] = defaultdict(float)
        self._behind_s: defaultdict[_Key, deque[float]] = defaultdict(lambda: deque(maxlen=_MAX_BEHIND))

    def count(self, arrivals: list[Arrivals], waiting: list[Arrivals], hosts: Mapping[int, str]) -> None:
        """Add all calls of a process group; ``waiting`` are those in which ranks wait for each other."""
        keys = {rank: (rank, hosts[rank]) for rank in sorted(arrivals[0])} if arrivals else {}
        for key in keys.values():
            self._seen[key] += len(arrivals)
            self._delayed[key] += len(waiting)
        for at in waiting:
            last = max(at, key=lambda rank: at[rank])
            behind_s = at[last] - median(at.values())
            if behind_s > 0:
                self._last[keys[last]] += 1
                self._behind_s[keys[last]].append(behind_s)
        for rank, cost_s in _costs(arrivals):
            self._cost_s[keys[rank]] += cost_s

    def add(self, sample: LatenessCounts) -> None:
        """Add what another sample shows."""
        self.samples += sample.samples
        self.duration_s += sample.duration_s
        self._seen.update(sample._seen)
        self._delayed.update(sample._delayed)
        self._last.update(sample._last)
        for key, cost_s in sample._cost_s.items():
            self._cost_s[key] += cost_s
        for key, behind_s in sample._behind_s.items():
            self._behind_s[key].extend(behind_s)

    def lateness(self) -> tuple[RankLateness, ...]:
        """The lateness of each rank, the most expensive first; of at least two ranks, or empty."""
        return tuple(sorted(map(self._lateness, self._seen), key=lambda each: -each.cost_share))

    def _lateness(self, key: _Key) -> RankLateness:
        behind_s = sorted(self._behind_s[key]) or [0.0]
        return RankLateness(
            *key,
            collectives=self._seen[key],
            delayed=self._delayed[key],
            last=self._last[key],
            median_s=median(behind_s),
            p95_s=behind_s[int(0.95 * (len(behind_s) - 1))],
            cost_share=min(self._cost_s[key] / self.duration_s, 1.0) if self.duration_s else 0.0,
        )


def window(
    answers: Iterable[CollectivesSampled],
    after: Mapping[str, int] | None = None,
    clocks: Mapping[str, ClockLimits] | None = None,
) -> tuple[LatenessCounts, LatenessCounts, dict[str, int]]:
    """What the nodes' answers to one question show.

    The lateness of the ranks. That of hosts, each under its lowest rank, if there are several, one of them with several
    ranks. And of each process group, the number of the newest collective that all ranks have called.

    Of each process group only what comes ``after`` a number counts, unless the group counts from 1 again. ``clocks``:
    what is known of the clocks of the hosts.
    """
    hosts, groups = _hosts_and_groups(answers)
    newest = {group: max(numbers) for group, by_rank in groups.items() if (numbers := _common_numbers(by_rank))}
    known = {group: number for group, number in (after or {}).items() if number <= newest.get(group, 0)}
    of_ranks, of_hosts = LatenessCounts(), LatenessCounts()
    duration_s = 0.0
    for group in newest:
        arrivals = _on_one_clock(_common(groups[group], known.get(group, 0)), hosts, clocks or {})
        duration_s = max(duration_s, _duration_s(arrivals))
        waiting = _with_waiting(arrivals)
        of_ranks.count(arrivals, waiting, hosts)
        if _are_comparable(groups[group], hosts):
            of_hosts.count(_by_host(arrivals, hosts), _by_host(waiting, hosts), hosts)
    for counts in (of_ranks, of_hosts):
        counts.samples, counts.duration_s = 1, duration_s
    return of_ranks, of_hosts, newest


def is_enough(lateness: Sequence[RankLateness]) -> bool:
    """Whether ``warning`` can decide."""
    return any(each.collectives >= MIN_COLLECTIVES and each.delayed >= MIN_DELAYED for each in lateness)


def suspect(lateness: Sequence[RankLateness]) -> RankLateness | None:
    """The rank that slows the job down, as far as these figures tell, however few they are."""
    if len(lateness) < 2:
        return None
    first, second = lateness[0], lateness[1]
    is_slow = first.last_share > MIN_LAST_SHARE and first.cost_share - second.cost_share > MIN_COST_SHARE
    return first if is_slow else None


def warning(lateness: Sequence[RankLateness], reason: str = "", *, of_hosts: bool = False) -> str:
    """One sentence about a rank that slows the job down; empty if there is none. ``reason``: why, in a few words.

    ``of_hosts``: the lateness is that of hosts, and the sentence about one of which all ranks are late.
    """
    slow = suspect(lateness)
    if slow is None or not is_enough([slow]):
        return ""
    if of_hosts:
        return f"all ranks on {quote(slow.host)} come after all others in {_costs_text(slow, reason, 'cost')}"
    return f"{ranks([slow.rank])} on {quote(slow.host)} is last in {_costs_text(slow, reason, 'costs')}"


def _costs_text(slow: RankLateness, reason: str, verb: str) -> str:
    late = f"median {_milliseconds(slow.median_s)} late{f'; {reason}' if reason else ''}"
    counted = f"{slow.last} of {slow.delayed} delayed collectives"
    return f"{counted} and {verb} {_percent(slow.cost_share)} of the time ({late})"


def summary(lateness: Sequence[RankLateness]) -> str:
    """One line on the rank that costs the most; ``lateness`` is not empty."""
    most = lateness[0]
    return (
        f"{most.collectives} collectives were looked at; {ranks([most.rank])} on {quote(most.host)} cost the most: "
        f"last in {most.last} of {most.delayed} delayed ones, {_percent(most.cost_share)} of the time"
    )


def lateness_table(lateness: Sequence[RankLateness]) -> list[str]:
    """Lines of a table of the ranks that cost the most."""
    head = ("rank", "host", "last in", "behind (median)", "behind (p95)", "cost")
    return table([head, *map(_row, lateness[:_MAX_SHOWN])])


def _row(each: RankLateness) -> tuple[str, ...]:
    last = f"{each.last_share:.0%} of {each.delayed}"
    return str(each.rank), each.host, last, *map(_milliseconds, (each.median_s, each.p95_s)), f"{each.cost_share:.1%}"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share < 0.1 else f"{share * 100:.0f} %"


def _milliseconds(duration_s: float) -> str:
    return f"{duration_s * 1000:.1f} ms"


def _hosts_and_groups(
    answers: Iterable[CollectivesSampled],
) -> tuple[dict[int, str], dict[str, dict[int, dict[int, int]]]]:
    """The host of each rank; and of each process group with several ranks, the times of each rank by number."""
    hosts: dict[int, str] = {}
    groups: defaultdict[str, dict[int, dict[int, int]]] = defaultdict(dict)
    for answer in answers:
        for each in answer.times:
            hosts[each.rank] = answer.host
            groups[each.group].setdefault(each.rank, {}).update(each.calls())
    return hosts, {group: by_rank for group, by_rank in groups.items() if len(by_rank) > 1}


def _common_numbers(by_rank: dict[int, dict[int, int]]) -> set[int]:
    return set.intersection(*(set(created) for created in by_rank.values()))


def _common(by_rank: dict[int, dict[int, int]], after: int) -> list[Arrivals]:
    """The newest collectives that all ranks have called, those after number ``after``, oldest first."""
    numbers = sorted(number for number in _common_numbers(by_rank) if number > after)
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


def _on_one_clock(
    arrivals: list[Arrivals], hosts: Mapping[int, str], clocks: Mapping[str, ClockLimits]
) -> list[Arrivals]:
    """The same times, all by the clock of the host of the lowest rank."""
    if not arrivals:
        return []
    members = grouped((hosts[rank], rank) for rank in sorted(arrivals[0]))
    (first, reference), *others = members.items()
    offsets = {
        rank: offset
        for host, own in others
        for offset in [_offset_s(arrivals, reference, own, _difference_s(clocks.get(first), clocks.get(host)))]
        for rank in own
    }
    return [{rank: time - offsets.get(rank, 0.0) for rank, time in at.items()} for at in arrivals]


def _difference_s(reference: ClockLimits | None, own: ClockLimits | None) -> tuple[float, float]:
    """Seconds by which the clock ``own`` is ahead of ``reference``: at least and at most."""
    if reference is None or own is None:
        return -math.inf, math.inf
    return (own[0] - reference[1]) / 1e9, (own[1] - reference[0]) / 1e9


def _offset_s(arrivals: list[Arrivals], reference: list[int], own: list[int], measured: tuple[float, float]) -> float:
    """Seconds by which the clock of the ranks ``own`` is ahead of that of ``reference``."""
    typical, least, most = _offset_by_calls_s(arrivals, reference, own)
    both = max(least, measured[0]), min(most, measured[1])
    least, most = both if both[0] <= both[1] else (least, most)  # A clock was set: only the calls count.
    return min(max(typical, least), most)


def _offset_by_calls_s(arrivals: list[Arrivals], reference: list[int], own: list[int]) -> tuple[float, float, float]:
    """The offset if both are equally late, and its limits."""
    first_own, last_own = _each(arrivals, own, min), _each(arrivals, own, max)
    first_ref, last_ref = _each(arrivals, reference, min), _each(arrivals, reference, max)
    typical = median(own - ref for own, ref in zip(first_own, first_ref, strict=True))
    lag = 1
    while lag <= min(_MAX_LAG, len(arrivals) - 1):  # Calls may overlap: each waits for one that is some calls earlier.
        least = _quantile([own - ref for own, ref in zip(last_own, first_ref[lag:])], 1 - _TRIMMED)  # noqa: B905
        most = _quantile([own - ref for own, ref in zip(first_own[lag:], last_ref)], _TRIMMED)  # noqa: B905
        if least <= most:
            return typical, least, most
        lag *= 2
    return typical, -math.inf, math.inf


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


def _duration_s(arrivals: list[Arrivals]) -> float:
    """The time between the first and the last call, by the clock of one rank."""
    if not arrivals:
        return 0.0
    rank = min(arrivals[0])
    at = [each[rank] for each in arrivals]
    return max(at) - min(at)


def _are_comparable(members: Iterable[int], hosts: Mapping[int, str]) -> bool:
    """Whether these ranks are on several hosts, and one of these has several of them."""
    counts = Counter(hosts[rank] for rank in members)
    return len(counts) > 1 and max(counts.values()) > 1


def _by_host(arrivals: Iterable[Mapping[int, float]], hosts: Mapping[int, str]) -> list[dict[int, float]]:
    """Of each collective the time of each host, under its lowest rank.

    A host of which all ranks come after all others has the time of its first rank, so it is as late as the job waits
    for the whole host; all others have that of the last rank elsewhere. If there is no such host, all are equal.
    """
    return [_host_times(at, hosts) for at in arrivals]


def _host_times(at: Mapping[int, float], hosts: Mapping[int, str]) -> dict[int, float]:
    members = grouped((hosts[rank], rank) for rank in sorted(at))
    times = {host: [at[rank] for rank in own] for host, own in members.items()}
    late = max(times, key=lambda host: min(times[host]))
    others = max(max(found) for host, found in times.items() if host != late)
    first = max(others, min(times[late]))
    return {lowest: first if host == late else others for host, (lowest, *_) in members.items()}
