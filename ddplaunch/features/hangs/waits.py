"""Where each rank waits, for which ranks and why: the calls of all ranks side by side, by process group and number."""

from __future__ import annotations

import enum
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ddplaunch.features.hangs import rank_list
from ddplaunch.features.hangs.rank_state import RankState, is_blocking, rank_state
from ddplaunch.features.hangs.records import CollectiveCall, FlightRecord, ProcessGroup, RankEvidence, Sizes
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import grouped

DEFAULT_GROUP = "default_pg"
"""torch's description of the group of all ranks."""

_MAX_SHIFT = 16
_OTHER_SIZES = ("all_to_all", "alltoall", "gather", "scatter", "coalesced")
"""Operations whose sizes may differ between ranks: by intent, or because only one rank passes the tensors."""

_OTHER_SIZES_ENDS = ("_v", "_v_single", "_coalesced")


class Group:
    """A process group and its collectives.

    Attributes:
        name, description, ranks: those of ``group``.
        by_rank: the calls of each rank that has a flight record, by number. The numbers of all ranks mean the same.
            Ranks with equal calls share the dictionary.
        shifts: what was added to the numbers of a rank for that.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.name, self.description, self.ranks = group.name, group.description, group.ranks
        self.by_rank: dict[int, dict[int, CollectiveCall]] = {}
        self.shifts: dict[int, int] = {}

    def last_number(self, rank: int) -> int:
        """Number of the newest call of ``rank``; 0 if there is none."""
        return max(self.by_rank.get(rank, {}), default=0)

    def calls_at(self, number: int) -> dict[int, CollectiveCall]:
        """The call with ``number`` of each rank that has made it, as far as its record reaches back."""
        return {rank: calls[number] for rank, calls in self.by_rank.items() if number in calls}


class Groups:
    """The process groups of the job. Two groups of one name, but with other members, are two groups.

    A group with unknown members has all ranks as members: too many are waited for, and none is overlooked.
    """

    def __init__(self, evidences: Iterable[RankEvidence]) -> None:
        evidences = list(evidences)
        self._all_ranks = rank_list.fold(sorted(evidence.rank for evidence in evidences))
        self._found: dict[tuple[str, str], Group] = {}
        self._of_rank: dict[int, dict[str, Group]] = {evidence.rank: {} for evidence in evidences}
        for is_known in (True, False):  # A rank that does not know the members can learn them from others.
            for evidence in evidences:
                for group in evidence.flight_record.groups if evidence.flight_record else ():
                    if bool(group.members) == is_known:
                        self._of_rank[evidence.rank][group.name] = self._intern(group, evidence.rank)
        for evidence in evidences:
            if evidence.flight_record:
                self._add_calls(evidence.rank, evidence.flight_record)
        for found in self._found.values():
            _align(found)

    def find(self, rank: int, name: str) -> Group:
        """The group that ``rank`` knows by this name; ``""`` is the group of all ranks."""
        named = self._of_rank[rank]
        if not name:
            is_default = (group for group in named.values() if group.description == DEFAULT_GROUP)
            return next(is_default, None) or self._intern(ProcessGroup("0", DEFAULT_GROUP, self._all_ranks), rank)
        if name not in named:
            named[name] = self._intern(ProcessGroup(name, "", ""), rank)
        return named[name]

    def _intern(self, group: ProcessGroup, rank: int) -> Group:
        if not group.members:
            same_name = (
                known for (name, _), known in self._found.items() if name == group.name and rank in known.ranks
            )
            return next(same_name, None) or self._intern(replace(group, members=self._all_ranks), rank)
        key = group.name, group.members
        if key not in self._found:
            self._found[key] = Group(group)
        return self._found[key]

    def _add_calls(self, rank: int, record: FlightRecord) -> None:
        for calls in record.made.collectives.values():
            by_rank = self.find(rank, record.group_name(next(iter(calls.values())))).by_rank
            by_rank[rank] = {**by_rank[rank], **calls} if rank in by_rank else calls


def signature(call: CollectiveCall) -> tuple[object, ...]:
    """What must be equal on all ranks: the operation, the number of elements, and the type."""
    return _signature(call.operation, call.input_sizes, call.output_sizes, call.dtypes)


@functools.lru_cache(1024)
def _signature(operation: str, input_sizes: Sizes, output_sizes: Sizes, dtypes: tuple[str, ...]) -> tuple[object, ...]:
    if operation.lstrip("_").startswith(_OTHER_SIZES) or operation.endswith(_OTHER_SIZES_ENDS):
        return (operation,)
    # Of a gathered or scattered tensor only the whole is equal; the parts of the ranks may differ.
    inputs = 0 if "gather" in operation else elements(input_sizes)
    outputs = 0 if "scatter" in operation else elements(output_sizes)
    return (operation, inputs, outputs, dtypes)


def elements(sizes: Sizes) -> int:
    """The number of elements of all tensors of a call."""
    return sum(math.prod(shape) for shape in sizes)


def _align(group: Group) -> None:
    """Shift the numbers of ranks that count calls which the others do not count.

    Numbers are believed unless the operations of finished calls contradict them, and another shift explains them all.
    """
    if not group.by_rank:
        return
    distinct = {id(calls): calls for calls in group.by_rank.values()}
    expected = _finished(max(distinct.values(), key=len))
    shifts = {key: _shift(_finished(calls), expected) for key, calls in distinct.items()}
    shifted = {
        key: {number + shift: call for number, call in distinct[key].items()} for key, shift in shifts.items() if shift
    }
    for rank, calls in group.by_rank.items() if shifted else ():
        if id(calls) in shifted:
            group.shifts[rank], group.by_rank[rank] = shifts[id(calls)], shifted[id(calls)]


def _shift(own: dict[int, tuple[object, ...]], expected: dict[int, tuple[object, ...]]) -> int:
    if _agrees(own, expected, 0):
        return 0
    shifts = sorted(range(-_MAX_SHIFT, _MAX_SHIFT + 1), key=abs)
    return next((shift for shift in shifts if _is_clear(own, expected, shift)), 0)


def _finished(calls: dict[int, CollectiveCall]) -> dict[int, tuple[object, ...]]:
    return {number: signature(call) for number, call in calls.items() if call.is_done}


def _agrees(own: dict[int, tuple[object, ...]], expected: dict[int, tuple[object, ...]], shift: int) -> bool:
    return all(expected.get(number + shift, sign) == sign for number, sign in own.items())


def _is_clear(own: dict[int, tuple[object, ...]], expected: dict[int, tuple[object, ...]], shift: int) -> bool:
    """Whether the shift fits, and is no coincidence of a program that repeats one call."""
    matches = [sign for number, sign in own.items() if expected.get(number + shift) == sign]
    return _agrees(own, expected, shift) and len(matches) > 2 and len(set(matches)) > 1


_UNRECORDED = ("send", "recv", "isend", "irecv", "monitored_barrier", "batch_isend_irecv")
"""Functions of which gloo makes no record; ``send_object_list`` and the like begin with them."""

_OWN_FAULT = {RankState.BLOCKED, RankState.DEBUGGED}
"""A rank in these states does not take part in the call in which it is."""


@dataclass(frozen=True)
class Place:
    """A call in which ranks wait.

    Attributes:
        group: the process group.
        operation: of the call, as in ``all_reduce``; or the Python function, if there is no record of the call.
        number: of the call in the group; 0 if unknown.
        sign: what must be equal on all ranks of the group.
        rank, peer: of a send or recv: the rank that calls, and the rank that it waits for.
    """

    group: Group
    operation: str
    number: int = 0
    sign: tuple[object, ...] = ()
    rank: int | None = None
    peer: int | None = None

    @property
    def is_send(self) -> bool:
        """A send, of whichever kind."""
        return self.rank is not None and "send" in self.operation


class Waits:
    """Who waits where for whom, from the evidence of all ranks.

    Attributes:
        evidence, states: of each rank.
        place_of: the place of each rank that waits.
        ranks_at: the ranks at each place, ascending.
        call_of: the call in which a rank waits, if it is in its flight record.
        called_ns: when it called that, as in ``FlightRecord``.
        is_over: the evidence is about the end of ranks that have ended since.
    """

    def __init__(self, evidences: Sequence[RankEvidence], *, is_over: bool = False) -> None:
        self.is_over = is_over
        self.evidence = {evidence.rank: evidence for evidence in sorted(evidences, key=lambda each: each.rank)}
        self.states = {rank: rank_state(evidence) for rank, evidence in self.evidence.items()}
        self._records = {rank: evidence.flight_record or FlightRecord() for rank, evidence in self.evidence.items()}
        self._groups = Groups(evidences)
        self.place_of: dict[int, Place] = {}
        self.call_of: dict[int, CollectiveCall] = {}
        self.called_ns: dict[int, int] = {}
        self.ranks_at: defaultdict[Place, list[int]] = defaultdict(list)
        self._known: dict[Place, frozenset[int]] = {}
        self._p2p = {rank: self._p2p_places(rank) for rank in self.evidence}
        self._functions = {rank: self._function_place(evidence) for rank, evidence in self.evidence.items()}
        self._in_function = grouped((function, rank) for rank, function in self._functions.items())
        for rank, state in self.states.items():
            if state == RankState.WAITING:
                self._stand(rank)

    def waits_for(self, place: Place) -> frozenset[int]:
        """The ranks for which those at ``place`` wait: empty if all have come and the call still does not finish."""
        if place not in self._known:
            if place.rank is not None:
                self._known[place] = self._missing_in_p2p(place)
            elif place.number:
                self._known[place] = self._missing_in_collective(place)
            else:
                self._known[place] = self._missing_in_function(place)
        return self._known[place]

    def group(self, rank: int, name: str) -> Group:
        """The process group that ``rank`` knows by this name."""
        return self._groups.find(rank, name)

    def _stand(self, rank: int) -> None:
        found = self._places(rank)
        if not found:
            return
        place, call = next(((place, call) for place, call in found if self.waits_for(place)), found[0])
        self.place_of[rank] = place
        self.ranks_at[place].append(rank)
        if call:
            self.call_of[rank] = call
            times = zip(self._records[rank].made.unfinished, self._records[rank].since_ns, strict=False)
            self.called_ns[rank] = next((time_ns for each, time_ns in times if each is call), 0)

    def _places(self, rank: int) -> list[tuple[Place, CollectiveCall | None]]:
        """Where the rank may wait, most probable first."""
        unfinished = self._unfinished(rank)
        function = self._functions[rank]
        has_p2p = any(call.is_p2p for _, call in unfinished)
        if function and function.operation.startswith(_UNRECORDED) and not has_p2p:
            return [(function, None)]
        return [*unfinished] or ([(function, None)] if function else [])

    def _unfinished(self, rank: int) -> list[tuple[Place, CollectiveCall]]:
        """Calls that have not finished, oldest first."""
        calls = self._records[rank].made.unfinished
        return [(self._p2p[rank][call] if call.is_p2p else self._collective(rank, call), call) for call in calls]

    def _group_of(self, rank: int, call: CollectiveCall) -> Group:
        return self._groups.find(rank, self._records[rank].group_name(call))

    def _collective(self, rank: int, call: CollectiveCall) -> Place:
        group = self._group_of(rank, call)
        return Place(group, call.operation, call.number + group.shifts.get(rank, 0), signature(call))

    def _p2p_places(self, rank: int) -> dict[CollectiveCall, Place]:
        """The unfinished sends and recvs in the rank's flight record."""
        calls = self._records[rank].made.unfinished
        return {call: _p2p(self._group_of(rank, call), rank, call) for call in calls if call.is_p2p}

    def _function_place(self, evidence: RankEvidence) -> Place | None:
        pending = evidence.pending
        if pending is None or not is_blocking(pending.function):
            return None
        group = self._groups.find(evidence.rank, pending.group)
        if "send" in pending.function or "recv" in pending.function:
            return Place(group, pending.function, rank=evidence.rank, peer=pending.peer)
        return Place(group, pending.function)

    def _missing_in_collective(self, place: Place) -> frozenset[int]:
        group = place.group
        present = {rank for rank in group.by_rank if group.last_number(rank) >= place.number}
        others = {rank for rank, call in group.calls_at(place.number).items() if signature(call) != place.sign}
        unable = {rank for rank in present if self._is_unable(rank)}
        return self._likely(set(group.ranks) - present) | others | unable

    def _likely(self, absent: set[int]) -> frozenset[int]:
        """Of ranks whose call is in no record: those that cannot have made it, or else those that perhaps have not."""
        functions = {rank for rank in absent if self._functions.get(rank) and not self._has_record(rank)}
        unknown = {rank for rank in absent if not self._has_record(rank)} - functions
        ended = {rank for rank in absent if self.states.get(rank) == RankState.ENDED}
        return frozenset((absent - functions - unknown | ended) or unknown or functions)

    def _has_record(self, rank: int) -> bool:
        return rank in self.evidence and self.evidence[rank].flight_record is not None

    def _is_unable(self, rank: int) -> bool:
        return self.states.get(rank) in _OWN_FAULT and any(self._unfinished(rank))

    def _missing_in_p2p(self, place: Place) -> frozenset[int]:
        if place.peer is None:  # A recv from any rank: any that does not wait could send.
            waiting = {rank for rank, state in self.states.items() if state == RankState.WAITING}
            return frozenset(set(place.group.ranks) - waiting)
        function = self._functions.get(place.peer)
        theirs: list[Place] = [*self._p2p.get(place.peer, {}).values(), *([function] if function else [])]
        is_met = any(each.peer == place.rank and each.is_send != place.is_send for each in theirs)
        return frozenset() if is_met and self.states.get(place.peer) not in _OWN_FAULT else frozenset({place.peer})

    def _missing_in_function(self, place: Place) -> frozenset[int]:
        return frozenset(place.group.ranks).difference(self._in_function.get(place, ()))


def _p2p(group: Group, rank: int, call: CollectiveCall) -> Place:
    """A send or recv of NCCL: ``send 0->1`` or ``recv 1<-0``, in ranks of the group."""
    operation, _, ends = call.operation.partition(" ")
    peer = ends.replace("->", " ").replace("<-", " ").split()[1:]
    index = int(peer[0]) if peer and re.fullmatch("[0-9]{1,9}", peer[0]) else len(group.ranks)
    return Place(group, operation, rank=rank, peer=group.ranks[index] if index < len(group.ranks) else None)


# Why ranks wait.


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


Side = tuple[CollectiveCall, tuple[int, ...]]
"""What some ranks called where others called something else."""


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
