"""Explains a hang: which ranks are the cause, who waits where for whom, in sentences and for ``hang.json``.

A cause is found by following who waits for whom to the ranks, calls or circles at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from ddplaunch.features.hangs import rank_state
from ddplaunch.features.hangs.rank_state import JobState, job_state
from ddplaunch.features.hangs.records import NodeEvidence, RankEvidence, with_fields
from ddplaunch.features.hangs.waits import Group, Place, Side, WaitReason, Waits, Why, signature
from ddplaunch.features.hangs.wording import (
    indirect_sentences,
    reason_sentences,
    since_ns,
    standing_sentences,
    unanswered_sentences,
    waiting_sentences,
)
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import grouped, plural, quote

MAX_SENTENCES = 12

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Operations with one source or one destination; reduce_scatter has none, and so no peer."""

_MAX_REASONS = 3


@dataclass(frozen=True)
class Explanation:
    """What is known about a job that stands still. ``wire.to_json`` makes JSON of it.

    Attributes:
        job_state: what the ranks do together.
        reasons: why ranks wait, the surest first: ``mismatch``, ``order``, ``missing``, ``circle``, ``unfinished``.
        culprits: the ranks to look at, ascending; empty if none stands out.
        sentences: at most MAX_SENTENCES, without full stop; the first says the cause.
        waits: every call in which ranks wait, as ``_wait`` tells it.
        states: the ranks in each ``RankState``.
    """

    job_state: JobState
    reasons: tuple[Why, ...]
    culprits: tuple[int, ...]
    sentences: tuple[str, ...]
    waits: tuple[dict[str, object], ...]
    states: dict[str, tuple[int, ...]]


def explain(evidences: Sequence[RankEvidence]) -> Explanation:
    """Explain what all ranks of all nodes do; one evidence per rank."""
    waits = Waits(evidences)
    reasons = _find_reasons(waits)
    culprits = {rank for reason in reasons for rank in reason.culprits}
    return Explanation(
        job_state=job_state(evidences),
        reasons=tuple(dict.fromkeys(reason.kind for reason in reasons)),
        culprits=tuple(sorted(culprits)),
        sentences=_sentences(waits, reasons),
        waits=tuple(_wait(waits, place) for place in waits.ranks_at),
        states=_states(waits),
    )


def explain_waiting(evidences: Sequence[RankEvidence]) -> Explanation:
    """As ``explain``, where output is no sign of movement: a job is busy of which ranks wait and others only write."""
    found = explain([_without_output(each) if rank_state.waits(each) else each for each in evidences])
    is_busy = found.waits and not any(each.collectives_moved for each in evidences)
    return replace(found, job_state=JobState.BUSY) if is_busy and found.job_state is JobState.MOVING else found


def _without_output(evidence: RankEvidence) -> RankEvidence:
    return with_fields(evidence, silent_s=max(evidence.silent_s, evidence.window_s))


def explain_failure(
    evidences: Sequence[RankEvidence], failed: Collection[int], causes: Collection[int]
) -> tuple[str, ...]:
    """Where ranks waited, and for whom, when an attempt ended because a collective failed; the cause first.

    Arguments:
        evidences: of the ranks of which something is known. Of one that failed it is what it has left.
        failed: the ranks that have failed.
        causes: those of them that have failed for another reason than the loss of a peer.
    """
    waits = Waits([_before_its_end(each) for each in evidences], is_over=True)
    # How far a rank has come that has failed and left nothing is not known.
    known = {each.rank for each in evidences if _has_left(each) or each.is_running or each.rank not in failed}
    lines: list[str] = []
    reasons = _find_reasons(waits)[:_MAX_REASONS]
    if reasons and reasons[0].kind in (Why.MISMATCH, Why.ORDER):  # The others follow from it.
        reasons = reasons[:1]
    for reason in reasons:
        is_known = known >= {*reason.culprits}
        lines += reason_sentences(waits, reason) if is_known else waiting_sentences(waits, reason, causes)
    return tuple(lines[:MAX_SENTENCES])


def _has_left(evidence: RankEvidence) -> bool:
    return bool(evidence.flight_record or evidence.pending)


def _before_its_end(evidence: RankEvidence) -> RankEvidence:
    """Nothing moved since the moment that the evidence is about."""
    is_running = evidence.is_running or _has_left(evidence)
    return with_fields(evidence, is_running=is_running, window_s=1.0, silent_s=1.0, collectives_moved=False)


def _sentences(waits: Waits, reasons: list[WaitReason]) -> tuple[str, ...]:
    if not reasons:
        return tuple(standing_sentences(waits, waits.evidence))
    shown = reasons[:_MAX_REASONS]
    lines = [line for reason in shown for line in reason_sentences(waits, reason)]
    lines += indirect_sentences(waits, reasons)
    unanswered = unanswered_sentences(waits.evidence.values())
    lines += [line for line in unanswered if not any(line in other for other in lines)]
    if hidden := len(reasons) - len(shown):
        lines = [*lines[: MAX_SENTENCES - 1], f"{hidden} more calls wait for other reasons"]
    return tuple(lines[:MAX_SENTENCES])


def _wait(waits: Waits, place: Place) -> dict[str, object]:
    """A call in which ranks wait, for hang.json.

    ``waits_for`` is empty if all have come, ``number`` and ``since_ns`` are 0 if unknown. ``since_ns``: when the first
    rank called, by the clock of its host, nanoseconds since the epoch.
    """
    return {
        "ranks": waits.ranks_at[place],
        "waits_for": sorted(waits.waits_for(place)),
        "operation": place.operation,
        "number": place.number,
        "group": place.group.name,
        "group_description": place.group.description,
        "since_ns": since_ns(waits, place),
    }


def _states(waits: Waits) -> dict[str, tuple[int, ...]]:
    states = grouped((state.value, rank) for rank, state in waits.states.items())
    return {state: tuple(members) for state, members in states.items()}


def with_gpus(found: Explanation, nodes: Sequence[NodeEvidence]) -> Explanation:
    """``found``, but not stuck if a GPU of one of ``nodes`` works; with a sentence about GPUs that work or spin."""
    gpus = [(node.host, gpu) for node in nodes for gpu in node.gpus]
    working = [f"GPU {gpu.index} of {quote(host)}" for host, gpu in gpus if rank_state.works(gpu)]
    failed = [f"GPU {gpu.index} of {quote(host)}: {quote(gpu.error)}" for host, gpu in gpus if gpu.error]
    spinning = sum(rank_state.spins(gpu) for _, gpu in gpus)
    sentences = []
    if working:
        sentences.append(f"{_gpus_that(len(working), 'compute')}, for example {working[0]}")
    if spinning:
        sentences.append(f"{_gpus_that(spinning, 'spin')}: 100 % busy at low power, as NCCL waits")
    sentences += failed[:3]
    state = JobState.BUSY if working and found.job_state is JobState.STUCK else found.job_state
    return replace(found, job_state=state, sentences=(*found.sentences, *sentences))


def _gpus_that(count: int, verb: str) -> str:
    """``1 GPU computes``, ``2 GPUs compute``."""
    return f"{plural(count, 'GPU')} {verb}{'s' * (count == 1)}"


# Reasons.


def _find_reasons(waits: Waits) -> list[WaitReason]:
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
    numbered = (place for place in _by_ranks(waits, waits.ranks_at) if place.number)
    places = grouped(((place.group, place.number), place) for place in numbered)
    found = ((group, number, _sides(group, number), there) for (group, number), there in places.items())
    reasons = [_mismatch(*parts) for parts in found if len(parts[2]) > 1]
    return sorted(reasons, key=lambda reason: reason.number)


def _sides(group: Group, number: int) -> tuple[Side, ...]:
    calls = group.calls_at(number)
    alike = grouped((signature(calls[rank]), rank) for rank in sorted(calls))
    sides = ((calls[members[0]], tuple(members)) for members in alike.values())
    return tuple(sorted(sides, key=lambda side: -len(side[1])))


def _mismatch(group: Group, number: int, sides: tuple[Side, ...], places: list[Place]) -> WaitReason:
    is_order = all(_calls_later(group, number, side, sides[0]) for side in sides[1:])
    culprits = _minority([members for _, members in sides])
    return WaitReason(Why.ORDER if is_order else Why.MISMATCH, culprits, tuple(places), sides, number)


def _minority(groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The ranks of all groups but the largest; of all if they are equally large."""
    largest = max(map(len, groups))
    few = [rank for group in groups if len(group) < largest for rank in group]
    return tuple(sorted(few or chain.from_iterable(groups)))


def _other_roots(waits: Waits) -> list[WaitReason]:
    """Calls like broadcast whose source or destination is not the same on all ranks that wait there."""
    reasons = []
    for place in waits.ranks_at:
        calls = ((rank, waits.evidence[rank].pending) for rank in waits.ranks_at[place])
        rooted = ((call.peer, rank) for rank, call in calls if call and call.function.startswith(_ROOTED))
        named = grouped((root, rank) for root, rank in rooted if root is not None)
        if place.number and len(named) > 1:
            roots = sorted(((root, tuple(members)) for root, members in named.items()), key=lambda each: -len(each[1]))
            culprits = _minority([members for _, members in roots])
            reasons.append(WaitReason(Why.MISMATCH, culprits, (place,), (), place.number, tuple(roots)))
    return reasons


def _calls_later(group: Group, number: int, one: Side, other: Side) -> bool:
    """Whether each of the two makes the call of the other after its own."""
    return all(
        any(later > number and signature(call) == signature(theirs) for later, call in group.by_rank[rank].items())
        for (_, (rank, *_)), (theirs, _) in ((one, other), (other, one))
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
