"""Sentences about why ranks wait: short, with equal ranks together, for the console and the failure page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.rank_state import BUSY_IO_BYTES_PER_S, RankState
from ddplaunch.features.hangs.waits import DEFAULT_GROUP, Group, Place, WaitReason, Waits, Why, elements
from ddplaunch.protocol.results import STACKS_FILE, AttemptResult
from ddplaunch.text import clock, grouped, plural, quote, ranks, size

if TYPE_CHECKING:
    from ddplaunch.features.hangs.records import CollectiveCall, RankEvidence

_MAX_LINES = 3
"""Of one kind within a reason: sides of a mismatch, places, kinds of culprits; hosts without an answer."""

_MAX_HOSTS, _MAX_PEERS = 4, 4
_MAX_LOCATIONS, _LOCATION_COLUMNS = 12, 200

_MAX_ELEMENTS = 1 << 60
"""No tensor has so many: the sizes come from a user's process."""


def reason_sentences(waits: Waits, reason: WaitReason) -> list[str]:
    """The reason first, then who waits, then what the culprits do."""
    headline = {
        Why.MISMATCH: _mismatch,
        Why.ORDER: _mismatch,
        Why.MISSING: _missing,
        Why.CIRCLE: _circle,
        Why.UNFINISHED: _unfinished,
    }[reason.kind]
    doing = standing_sentences(waits, reason.culprits) if reason.kind == Why.MISSING else []
    return [headline(waits, reason), *_waiting(waits, reason), *doing]


def waiting_sentences(waits: Waits, reason: WaitReason, named: Collection[int] | None = None) -> list[str]:
    """Who waits where for whom; of these only the ``named`` ranks, unless that is None."""
    return [_waiting_elsewhere(waits, place, named) for place in reason.places[:_MAX_LINES]]


def standing_sentences(waits: Waits, members: Iterable[int]) -> list[str]:
    """What ranks do that do not wait: ``rank 2 is at train.py:6 in step (sleep), suspended by a signal``."""
    members = tuple(members)
    alike = grouped((_standing(waits, rank), rank) for rank in members)
    has_ended = {rank for rank in members if waits.states.get(rank) is RankState.ENDED}
    groups = sorted(alike.items(), key=lambda item: (item[1][0] in has_ended, -len(item[1]), item[1]))
    lines = [f"{ranks(group)} {text[len(group) > 1]}" for text, group in groups[:_MAX_LINES]]
    others = sum(len(group) for _, group in groups[_MAX_LINES:])
    return [*lines, f"{plural(others, 'more rank')} stand elsewhere"] if others > 1 else lines


def call_text(group: Group, number: int, call: CollectiveCall | None, operation: str) -> str:
    """``all_reduce #6 of default_pg (3 floats)``."""
    numbered = f"{quote(operation)} #{number}" if number else quote(operation)
    return f"{numbered} of {_group(group)}{_amount(call)}"


def _group(group: Group) -> str:
    name = quote(group.description or f"process group {group.name}")
    return name if group.description == DEFAULT_GROUP else f"{name} ({ranks(group.ranks)})"


def _amount(call: CollectiveCall | None) -> str:
    count = elements(call.input_sizes or call.output_sizes) if call else 0
    if not call or not 0 < count < _MAX_ELEMENTS:
        return ""
    dtype = quote(call.dtypes[0].lower()) if call.dtypes else "element"
    return f" ({count} {dtype})" if dtype[-1:].isdigit() else f" ({plural(count, dtype)})"


def _place(waits: Waits, place: Place) -> str:
    if place.rank is not None:
        way = "to" if place.is_send else "from"
        return f"{quote(place.operation)} {way} {'any rank' if place.peer is None else f'rank {place.peer}'}"
    call = waits.call_of.get(waits.ranks_at[place][0]) if place.number else None
    return call_text(place.group, place.number, call, place.operation)


def _on_hosts(waits: Waits, members: tuple[int, ...]) -> str:
    """``ranks 2-3 on gpu1``, if there are several hosts."""
    hosts = {waits.evidence[rank].host for rank in members if rank in waits.evidence}
    is_one = len({evidence.host for evidence in waits.evidence.values()}) == 1
    if is_one or not hosts or len(hosts) > _MAX_HOSTS:
        return ranks(members)
    return f"{ranks(members)} on {', '.join(map(quote, sorted(hosts)))}"


def _missing(waits: Waits, reason: WaitReason) -> str:
    place = reason.places[0]
    who = _on_hosts(waits, reason.culprits)
    if place.rank is not None:
        return f"{who} never {'received from' if place.is_send else 'sent to'} rank {place.rank}"
    absent = tuple(rank for rank in reason.culprits if not 0 < place.number <= place.group.last_number(rank))
    if not absent:
        return f"{who} {'does' if len(reason.culprits) == 1 else 'do'} not go on in {_place(waits, place)}"
    is_sure = all(_is_known(waits, rank) for rank in absent)
    return f"{_on_hosts(waits, absent)} {'' if is_sure else 'probably '}never joined {_place(waits, place)}"


def _is_known(waits: Waits, rank: int) -> bool:
    evidence = waits.evidence.get(rank)
    return evidence is not None and (evidence.flight_record is not None or not evidence.is_running)


def _mismatch(waits: Waits, reason: WaitReason) -> str:
    group = reason.places[0].group
    if reason.roots:
        named = [f"{ranks(members)} {'name' if members[1:] else 'names'} rank {root}" for root, members in reason.roots]
        place = _place(waits, reason.places[0])
        return f"the source or destination of {place} is not the same on all ranks: {', '.join(named[:_MAX_LINES])}"
    sides = [f"{ranks(who)} called {quote(call.operation)}{_amount(call)}" for call, who in reason.sides[:_MAX_LINES]]
    more = plural(len(reason.sides) - _MAX_LINES, "more variant")
    listed = ", ".join([*sides, *([more] if len(reason.sides) > _MAX_LINES else [])])
    if reason.kind == Why.ORDER:
        return f"ranks of {_group(group)} make the same calls in another order, from #{reason.number} on: {listed}"
    return f"call #{reason.number} of {_group(group)} is not the same on all ranks: {listed}"


def _circle(waits: Waits, reason: WaitReason) -> str:
    p2p = next((place for place in reason.places if place.rank is not None), None)
    if p2p is None or all(place.rank is not None for place in reason.places):
        return f"{ranks(reason.culprits)} wait for each other"
    problem = (
        "sends to rank {}, which does not receive" if p2p.is_send else "receives from rank {}, which does not send"
    )
    return f"{_on_hosts(waits, (p2p.rank or 0,))} {problem.format(p2p.peer)}"


def _unfinished(waits: Waits, reason: WaitReason) -> str:
    place = reason.places[0]
    there = tuple(waits.ranks_at[place])
    if place.rank is not None:
        return f"rank {place.rank} waits in {_place(waits, place)}, and it does not finish"
    done = [rank for rank, call in place.group.calls_at(place.number).items() if call.is_done]
    if done:
        return f"{_place(waits, place)} has finished on {ranks(done)}, but not on {_on_hosts(waits, there)}"
    text = f"all ranks joined {_place(waits, place)}, and it does not finish"
    if reason.culprits:
        return f"{text}: the GPU of {_on_hosts(waits, reason.culprits)} has not started it"
    unanswered = unanswered_sentences(waits.evidence[rank] for rank in there)
    return f"{text}: {'; '.join(unanswered) or 'look at the network, the GPUs and their driver'}"


def _waiting(waits: Waits, reason: WaitReason) -> list[str]:
    if reason.kind == Why.MISSING and reason.places[0].rank is None:
        first = [_waiting_line(waits, reason.places[0], "there")]
        return first + [_waiting_elsewhere(waits, place) for place in reason.places[1:_MAX_LINES]]
    if reason.kind == Why.UNFINISHED:
        return [_waiting_line(waits, reason.places[0], "there")]
    return waiting_sentences(waits, reason)


def _waiting_line(waits: Waits, place: Place, where: str) -> str:
    there = waits.ranks_at[place]
    since = since_ns(waits, place)
    line = _most_common(waits.evidence[rank].where for rank in there)
    time = f" since {clock(since / 1e9).partition('.')[0]}" if since else ""
    verb = "waited" if waits.is_over else f"wait{'s' * (len(there) == 1)}"
    return f"{ranks(there)} {verb} {where}{time}{f' ({quote(line, 120)})' if line else ''}"


def _waiting_elsewhere(waits: Waits, place: Place, named: Collection[int] | None = None) -> str:
    missing = [rank for rank in sorted(waits.waits_for(place)) if named is None or rank in named]
    whom = f" for {ranks(missing)}" if missing and place.rank is None else ""
    return _waiting_line(waits, place, f"in {_place(waits, place)}{whom}")


def indirect_sentences(waits: Waits, reasons: list[WaitReason]) -> list[str]:
    """Who waits for ranks that wait themselves."""
    shown = {place for reason in reasons for place in reason.places}
    places = [place for place in waits.ranks_at if place not in shown]
    places.sort(key=lambda place: (-len(waits.ranks_at[place]), waits.ranks_at[place]))
    lines = [_waiting_elsewhere(waits, place) for place in places[:_MAX_LINES]]
    hidden = [rank for place in places[_MAX_LINES:] for rank in waits.ranks_at[place]]
    verb = "wait" if len(hidden) > 1 else "waits"
    return [*lines, f"{plural(len(hidden), 'more rank')} {verb} for these"] if hidden else lines


def since_ns(waits: Waits, place: Place) -> int:
    """When the first of the ranks at ``place`` called it, by the clock of its host; 0 if unknown."""
    times = (waits.called_ns.get(rank, 0) for rank in waits.ranks_at[place])
    return min((time for time in times if time), default=0)


def _standing(waits: Waits, rank: int) -> tuple[str, str]:
    """What the rank does, as said of one and of several ranks."""
    evidence = waits.evidence.get(rank)
    if evidence is None:
        return "is on a node that says nothing", "are on a node that says nothing"
    state = waits.states[rank]
    if state == RankState.ENDED:
        last = _last_call(waits, evidence)
        return f"has ended{last}", f"have ended{last}"
    at = f"at {quote(evidence.where, 120)}" if evidence.where else "at an unknown line"
    text = ", ".join([at, *_details(evidence, state)])
    return f"is {text}", f"are {text}"


def _last_call(waits: Waits, evidence: RankEvidence) -> str:
    record = evidence.flight_record
    if not record or not record.made.all:
        return ""
    last = record.made.all[-1]
    group = waits.group(evidence.rank, record.group_name(last))
    return f" (its last call was {call_text(group, last.number, last, last.operation)})"


def _details(evidence: RankEvidence, state: RankState) -> list[str]:
    found = (
        (evidence.blocked_state, quote(evidence.blocked_state)),
        (evidence.debugger, f"in the debugger {quote(evidence.debugger)}"),
        (evidence.waits_for_input, "waiting for input"),
        (state == RankState.BUSY, _load(evidence) if state == RankState.BUSY else ""),
        (state == RankState.MOVING, "moving"),
        (evidence.busy_child, f"with the process {quote(evidence.busy_child)}"),
    )
    return [text for is_so, text in found if is_so]


def _load(evidence: RankEvidence) -> str:
    """Rounded, so that ranks that do the same are shown together."""
    io = evidence.io_bytes / evidence.window_s
    if io >= BUSY_IO_BYTES_PER_S and evidence.cpu_s < 0.1 * evidence.window_s:
        return f"reading and writing some {size(float(f'{io:.0e}'))}/s"
    return f"computing on {_cores(evidence.cpu_s / evidence.window_s)}"


def _cores(share: float) -> str:
    return f"some {plural(round(share), 'core')}" if share >= 0.75 else "a part of a core"


def unanswered_sentences(evidences: Iterable[RankEvidence]) -> list[str]:
    """``ranks 0-1 on gpu0 get no answer over TCP from 10.0.0.2``; one sentence for each host, of a few hosts."""
    by_host = grouped((evidence.host, evidence) for evidence in evidences if evidence.unanswered)
    return [_unanswered_sentence(host, found) for host, found in list(by_host.items())[:_MAX_LINES]]


def _unanswered_sentence(host: str, found: list[RankEvidence]) -> str:
    members, peers = [each.rank for each in found], sorted({peer for each in found for peer in each.unanswered})
    more = f" and {len(peers) - _MAX_PEERS} more" if len(peers) > _MAX_PEERS else ""
    verb = "gets" if len(members) == 1 else "get"
    whom = ", ".join(map(quote, peers[:_MAX_PEERS]))
    return f"{ranks(members)} on {quote(host)} {verb} no answer over TCP from {whom}{more}"


def _most_common(texts: Iterable[str]) -> str:
    """The text that occurs most often; empty if there is none."""
    counts = Counter(text for text in texts if text)
    return counts.most_common(1)[0][0] if counts else ""


# The failure page.


def stuck_ranks(attempt: AttemptResult, run_dir: str | None, *, is_remote: bool) -> list[str]:
    """For a job that hung: the ranks by location; the smallest group first, since it is the likely cause."""
    by_location = grouped((exit_.whereabouts or "unknown", exit_.rank) for exit_ in attempt.exits)
    if not attempt.hung or set(by_location) <= {"unknown"}:
        return []
    found = sorted(by_location.items(), key=lambda item: (len(item[1]), item[1]))
    lines = [f"  {ranks(group)}: {quote(location, _LOCATION_COLUMNS)}" for location, group in found[:_MAX_LOCATIONS]]
    if len(found) > _MAX_LOCATIONS:
        lines.append(f"  {len(found) - _MAX_LOCATIONS} more locations")
    files = _stacks_files(attempt, run_dir, is_remote=is_remote)
    return ["", "Where the ranks were" + (f"; full stacks in {files}:" if files else ":"), *lines]


def _stacks_files(attempt: AttemptResult, run_dir: str | None, *, is_remote: bool) -> str:
    """Shell pattern for the files with the stacks, which are on this machine; empty if no files are kept."""
    folders = {os.path.dirname(os.path.dirname(exit_.log_file)) for exit_ in attempt.exits if exit_.log_file}
    if not run_dir or not folders:
        return ""
    if is_remote:
        return f"{run_dir}/failed/rank_*/{STACKS_FILE}"
    folder = folders.pop() if len(folders) == 1 else f"{run_dir}/*/attempt_{attempt.attempt}"
    return f"{folder}/*/{STACKS_FILE}"
