"""Why ranks wait: follows who waits for whom to the ranks, calls or circles at the end."""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.groups import signature
from ddplaunch.features.hangs.records import CollectiveCall
from ddplaunch.features.hangs.waits import Place
from ddplaunch.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddplaunch.features.hangs.groups import Group
    from ddplaunch.features.hangs.waits import Waits


_ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Operations with one source or one destination; reduce_scatter has none, and so no peer."""


class Why(str, enum.Enum):
    """Why a call does not finish."""

    MISMATCH = "mismatch"
    """Ranks call something else at the same number, or with another size."""
    ORDER = "order"
    """Ranks make the same calls in another order."""
    MISSING = "missing"
    """Ranks have not come, and wait for nobody."""
    CIRCLE = "circle"
    """Ranks wait for each other in different calls."""
    UNFINISHED = "unfinished"
    """All ranks have come, and the call does not finish."""


@dataclass(frozen=True)
class Side:
    """What some ranks called where others called something else."""

    call: CollectiveCall
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class WaitReason:
    """One reason why ranks wait.

    Attributes:
        culprits: the ranks to look at, ascending; empty if none stands out.
        places: where ranks wait for this reason: for the culprits, or in the circle, the most important first.
        sides: of a mismatch: what was called, by most ranks first.
        number: of a mismatch: the number of the call.
        roots: if the ranks do not agree on the source or destination of the call: each such rank, and the ranks that
            name it, most ranks first.
    """

    kind: Why
    culprits: tuple[int, ...]
    places: tuple[Place, ...]
    sides: tuple[Side, ...] = ()
    number: int = 0
    roots: tuple[tuple[int, tuple[int, ...]], ...] = ()


def find_reasons(waits: Waits) -> list[WaitReason]:
    """All reasons, the surest first."""
    mismatches = [*_mismatches(waits), *_other_roots(waits)]
    missing = _missing(waits)
    named = {place for reason in mismatches for place in reason.places if reason.roots}
    complete = [place for place in waits.ranks_at if not waits.waits_for(place)]
    unfinished = [_unfinished(waits, place) for place in complete if place not in named]
    found = [*mismatches, *missing, *unfinished]
    explained = _leading_to(waits, {place for reason in found for place in reason.places})
    return [*mismatches, *missing, *_circles(waits, explained), *unfinished]


def _mismatches(waits: Waits) -> list[WaitReason]:
    places: defaultdict[tuple[Group, int], list[Place]] = defaultdict(list)
    for place in _by_ranks(waits, waits.ranks_at):
        if place.number:
            places[place.group, place.number].append(place)
    found = ((group, number, _sides(group, number), there) for (group, number), there in places.items())
    reasons = [_mismatch(*parts) for parts in found if len(parts[2]) > 1]
    return sorted(reasons, key=lambda reason: reason.number)


def _sides(group: Group, number: int) -> tuple[Side, ...]:
    ranks: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    calls = group.calls_at(number)
    for rank in sorted(calls):
        ranks[signature(calls[rank])].append(rank)
    sides = (Side(calls[members[0]], tuple(members)) for members in ranks.values())
    return tuple(sorted(sides, key=lambda side: -len(side.ranks)))


def _mismatch(group: Group, number: int, sides: tuple[Side, ...], places: list[Place]) -> WaitReason:
    most = sides[0]
    minority = [rank for side in sides if len(side.ranks) < len(most.ranks) for rank in side.ranks]
    culprits = minority or [rank for side in sides for rank in side.ranks]
    kind = Why.ORDER if all(_calls_later(group, number, side, most) for side in sides[1:]) else Why.MISMATCH
    return WaitReason(kind, tuple(sorted(culprits)), tuple(places), sides, number)


def _other_roots(waits: Waits) -> list[WaitReason]:
    """Calls like broadcast whose source or destination is not the same on all ranks that wait there."""
    reasons = []
    for place in waits.ranks_at:
        named: defaultdict[int, list[int]] = defaultdict(list)
        for rank in waits.ranks_at[place]:
            pending = waits.evidence[rank].pending
            if pending and pending.peer is not None and pending.function.startswith(_ROOTED):
                named[pending.peer].append(rank)
        if place.number and len(named) > 1:
            roots = sorted(((root, tuple(members)) for root, members in named.items()), key=lambda each: -len(each[1]))
            most = len(roots[0][1])
            few = [rank for _, members in roots if len(members) < most for rank in members]
            culprits = few or [rank for _, members in roots for rank in members]
            reasons.append(WaitReason(Why.MISMATCH, tuple(sorted(culprits)), (place,), (), place.number, tuple(roots)))
    return reasons


def _calls_later(group: Group, number: int, one: Side, other: Side) -> bool:
    """Whether each of the two makes the call of the other after its own."""
    return all(
        any(later > number and signature(call) == signature(theirs.call) for later, call in calls.items())
        for own, theirs in ((one, other), (other, one))
        for calls in [group.by_rank[own.ranks[0]]]
    )


def _missing(waits: Waits) -> list[WaitReason]:
    """One reason for each set of ranks that have not come."""
    by_culprits: defaultdict[tuple[int, ...], list[Place]] = defaultdict(list)
    for place in _by_ranks(waits, waits.ranks_at):
        absent = waits.waits_for(place) - _mismatched(place)
        if culprits := tuple(sorted(rank for rank in absent if rank not in waits.place_of)):
            by_culprits[culprits].append(place)
    found = by_culprits.items()
    reasons = [WaitReason(Why.MISSING, culprits, tuple(_direct_first(waits, places))) for culprits, places in found]
    return sorted(reasons, key=lambda reason: -sum(len(waits.ranks_at[place]) for place in reason.places))


def _mismatched(place: Place) -> set[int]:
    """Ranks that have come with another call."""
    if not place.number:
        return set()
    return {rank for rank, call in place.group.calls_at(place.number).items() if signature(call) != place.sign}


def _direct_first(waits: Waits, places: list[Place]) -> list[Place]:
    """Places where ranks wait for the culprits only come before those where they also wait for ranks that wait."""
    return sorted(places, key=lambda place: any(rank in waits.place_of for rank in waits.waits_for(place)))


def _unfinished(waits: Waits, place: Place) -> WaitReason:
    """If NCCL runs the call on some GPUs and not on all, the ranks of the others are the culprits."""
    calls = {rank: waits.call_of[rank] for rank in waits.ranks_at[place] if rank in waits.call_of}
    not_started = [rank for rank, call in calls.items() if not call.is_started]
    is_late = [rank for rank in waits.ranks_at[place] if rank in calls and _others_finished(place)]
    culprits = is_late or (not_started if len(not_started) < len(calls) else [])
    return WaitReason(Why.UNFINISHED, tuple(culprits), (place,))


def _others_finished(place: Place) -> bool:
    return any(call.is_done for call in place.group.calls_at(place.number).values())


def _leading_to(waits: Waits, ends: set[Place]) -> set[Place]:
    """The places whose ranks wait, over any number of others, for ranks at ``ends``; these too."""
    before: defaultdict[Place, set[Place]] = defaultdict(set)
    for place in waits.ranks_at:
        for following in _next_places(waits, place):
            before[following].add(place)
    reached, todo = set(ends), list(ends)
    while todo:
        new = before[todo.pop()] - reached
        reached |= new
        todo.extend(new)
    return reached


def _next_places(waits: Waits, place: Place) -> list[Place]:
    found = (waits.place_of.get(rank) for rank in sorted(waits.waits_for(place)))
    return list(dict.fromkeys(place for place in found if place))


def _circles(waits: Waits, explained: set[Place]) -> list[WaitReason]:
    """Places outside of ``explained`` lead to each other only."""
    reasons = []
    while rest := [place for place in _by_ranks(waits, waits.ranks_at) if place not in explained]:
        circle = _circle(waits, rest[0])
        culprits = {
            rank
            for place, following in zip(circle, [*circle[1:], circle[0]], strict=True)
            for rank in waits.waits_for(place) & set(waits.ranks_at[following])
        }
        reasons.append(WaitReason(Why.CIRCLE, tuple(sorted(culprits)), tuple(circle)))
        explained = explained | _leading_to(waits, set(circle))
    return reasons


def _circle(waits: Waits, start: Place) -> list[Place]:
    """The circle that is reached from ``start``, each place followed by one for whose ranks it waits."""
    path: dict[Place, None] = {}
    place = start
    while place not in path:
        path[place] = None
        following = _next_places(waits, place)
        place = next((each for each in following if each in path), following[0])
    walked = list(path)
    return walked[walked.index(place) :]


def _by_ranks(waits: Waits, places: Iterable[Place]) -> list[Place]:
    """Most ranks first."""
    return sorted(places, key=lambda place: (-len(waits.ranks_at[place]), waits.ranks_at[place]))


def most_common(texts: Iterable[str]) -> str:
    """The text that occurs most often; empty if there is none."""
    counts = Counter(text for text in texts if text)
    return counts.most_common(1)[0][0] if counts else ""
