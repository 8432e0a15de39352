"""Where each rank waits, and for which ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.groups import Group, Groups, signature
from ddplaunch.features.hangs.rank_state import RankState, is_blocking, rank_state
from ddplaunch.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.features.hangs.records import CollectiveCall, RankEvidence

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
        is_over: the evidence is about the end of ranks that have ended since.
    """

    def __init__(self, evidences: Sequence[RankEvidence], *, is_over: bool = False) -> None:
        self.is_over = is_over
        self.evidence = {evidence.rank: evidence for evidence in sorted(evidences, key=lambda each: each.rank)}
        self.states = {rank: rank_state(evidence) for rank, evidence in self.evidence.items()}
        self._groups = Groups(evidences)
        self.place_of: dict[int, Place] = {}
        self.call_of: dict[int, CollectiveCall] = {}
        self.ranks_at: defaultdict[Place, list[int]] = defaultdict(list)
        self._known: dict[Place, frozenset[int]] = {}
        self._p2p = {rank: self._p2p_places(rank) for rank in self.evidence}
        self._functions = {rank: self._function_place(evidence) for rank, evidence in self.evidence.items()}
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
        calls = [call for call in self._calls(rank) if not call.is_done]
        return [(self._p2p[rank][call] if call.is_p2p else self._collective(rank, call), call) for call in calls]

    def _calls(self, rank: int) -> tuple[CollectiveCall, ...]:
        record = self.evidence[rank].flight_record
        return record.calls if record else ()

    def _collective(self, rank: int, call: CollectiveCall) -> Place:
        group = self._groups.find(rank, call.group)
        return Place(group, call.operation, call.number + group.shifts.get(rank, 0), signature(call))

    def _p2p_places(self, rank: int) -> dict[CollectiveCall, Place]:
        """The unfinished sends and recvs in the rank's flight record."""
        calls = [call for call in self._calls(rank) if call.is_p2p and not call.is_done]
        return {call: _p2p(self._groups.find(rank, call.group), rank, call) for call in calls}

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
        there = {rank for rank, function in self._functions.items() if function == place}
        return frozenset(set(place.group.ranks) - there)


def _p2p(group: Group, rank: int, call: CollectiveCall) -> Place:
    """A send or recv of NCCL: ``send 0->1`` or ``recv 1<-0``, in ranks of the group."""
    operation, _, ends = call.operation.partition(" ")
    peer = ends.replace("->", " ").replace("<-", " ").split()[1:]
    index = int(peer[0]) if peer and peer[0].isdigit() else len(group.ranks)
    return Place(group, operation, rank=rank, peer=group.ranks[index] if index < len(group.ranks) else None)
