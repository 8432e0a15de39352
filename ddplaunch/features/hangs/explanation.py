"""Explains a hang: which ranks are the cause, who waits where for whom, in sentences and for ``hang.json``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.features.hangs import rank_state
from ddplaunch.features.hangs.findings import WaitReason, Why, find_reasons
from ddplaunch.features.hangs.network import unanswered_sentences
from ddplaunch.features.hangs.rank_state import JobState, job_state
from ddplaunch.features.hangs.waits import Waits
from ddplaunch.features.hangs.wording import (
    indirect_sentences,
    reason_sentences,
    since_ns,
    standing_sentences,
    waiting_sentences,
)
from ddplaunch.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ddplaunch.features.hangs.records import RankEvidence
    from ddplaunch.features.hangs.waits import Place

MAX_SENTENCES = 12

_MAX_REASONS = 3


@dataclass(frozen=True)
class Wait:
    """Ranks that wait in one call.

    Attributes:
        ranks: the ranks that wait, ascending.
        waits_for: the ranks for which they wait; empty if all have come.
        operation: as in ``CollectiveCall``, or the name of the Python function.
        number: of the call in its process group; 0 if unknown.
        group: name of the process group.
        group_description: description of the process group.
        since_ns: when the first of them called, by the clock of its host, nanoseconds since the epoch; 0 if unknown.
    """

    ranks: tuple[int, ...]
    waits_for: tuple[int, ...]
    operation: str
    number: int
    group: str
    group_description: str
    since_ns: int


@dataclass(frozen=True)
class Explanation:
    """What is known about a job that stands still. ``wire.to_json`` makes JSON of it.

    Attributes:
        job_state: what the ranks do together.
        reasons: why ranks wait, the surest first: ``mismatch``, ``order``, ``missing``, ``circle``, ``unfinished``.
        culprits: the ranks to look at, ascending; empty if none stands out.
        sentences: at most MAX_SENTENCES, without full stop; the first says the cause.
        waits: every call in which ranks wait.
        states: the ranks in each ``RankState``.
    """

    job_state: JobState
    reasons: tuple[Why, ...]
    culprits: tuple[int, ...]
    sentences: tuple[str, ...]
    waits: tuple[Wait, ...]
    states: dict[str, tuple[int, ...]]


def explain(evidences: Sequence[RankEvidence]) -> Explanation:
    """Explain what all ranks of all nodes do; one evidence per rank."""
    waits = Waits(evidences)
    reasons = find_reasons(waits)
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
    return replace(evidence, silent_s=max(evidence.silent_s, evidence.window_s))


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
    reasons = find_reasons(waits)[:_MAX_REASONS]
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
    return replace(evidence, is_running=is_running, window_s=1.0, silent_s=1.0, collectives_moved=False)


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


def _wait(waits: Waits, place: Place) -> Wait:
    return Wait(
        ranks=tuple(waits.ranks_at[place]),
        waits_for=tuple(sorted(waits.waits_for(place))),
        operation=place.operation,
        number=place.number,
        group=place.group.name,
        group_description=place.group.description,
        since_ns=since_ns(waits, place),
    )


def _states(waits: Waits) -> dict[str, tuple[int, ...]]:
    states: defaultdict[str, list[int]] = defaultdict(list)
    for rank, state in waits.states.items():
        states[state.value].append(rank)
    return {state: tuple(members) for state, members in states.items()}
