"""The calls of all ranks side by side: per process group and number, who called what."""

from __future__ import annotations

import math
from dataclasses import field, replace
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.records import CollectiveCall, ProcessGroup
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import rank_list

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddplaunch.features.hangs.records import RankEvidence

DEFAULT_GROUP = "default_pg"
"""torch's description of the group of all ranks."""

_MAX_SHIFT = 16
_OTHER_SIZES = ("all_to_all", "alltoall", "gather", "scatter", "coalesced")
"""Operations whose sizes may differ between ranks: by intent, or because only one rank passes the tensors."""

_OTHER_SIZES_ENDS = ("_v", "_v_single", "_coalesced")


@dataclass(eq=False)
class Group:
    """A process group and its collectives.

    Attributes:
        name, description, ranks: as in ``ProcessGroup``.
        by_rank: the calls of each rank that has a flight record, by number. The numbers of all ranks mean the same.
        shifts: what was added to the numbers of a rank for that.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    by_rank: dict[int, dict[int, CollectiveCall]] = field(default_factory=dict)
    shifts: dict[int, int] = field(default_factory=dict)

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
            self._add_calls(evidence)
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
            self._found[key] = Group(group.name, group.description, group.ranks)
        return self._found[key]

    def _add_calls(self, evidence: RankEvidence) -> None:
        for call in evidence.flight_record.calls if evidence.flight_record else ():
            if not call.is_p2p:
                group = self.find(evidence.rank, call.group)
                group.by_rank.setdefault(evidence.rank, {})[call.number] = call


def signature(call: CollectiveCall) -> tuple[object, ...]:
    """What must be equal on all ranks: the operation, the number of elements, and the type."""
    operation = call.operation
    if operation.lstrip("_").startswith(_OTHER_SIZES) or operation.endswith(_OTHER_SIZES_ENDS):
        return (operation,)
    # Of a gathered or scattered tensor only the whole is equal; the parts of the ranks may differ.
    inputs = 0 if "gather" in operation else _elements(call.input_sizes)
    outputs = 0 if "scatter" in operation else _elements(call.output_sizes)
    return (operation, inputs, outputs, call.dtypes)


def _elements(sizes: tuple[tuple[int, ...], ...]) -> int:
    return sum(math.prod(shape) for shape in sizes)


def _align(group: Group) -> None:
    """Shift the numbers of ranks that count calls which the others do not count.

    Numbers are believed unless the operations of finished calls contradict them, and another shift explains them all.
    """
    if not group.by_rank:
        return
    reference = max(group.by_rank, key=lambda rank: len(group.by_rank[rank]))
    expected = _finished(group.by_rank[reference])
    for rank, calls in group.by_rank.items():
        own = _finished(calls)
        if rank != reference and not _agrees(own, expected, 0):
            shifts = sorted(range(-_MAX_SHIFT, _MAX_SHIFT + 1), key=abs)
            shift = next((shift for shift in shifts if _is_clear(own, expected, shift)), 0)
            group.shifts[rank] = shift
            group.by_rank[rank] = {number + shift: call for number, call in calls.items()}


def _finished(calls: dict[int, CollectiveCall]) -> dict[int, tuple[object, ...]]:
    return {number: signature(call) for number, call in calls.items() if call.is_done}


def _agrees(own: dict[int, tuple[object, ...]], expected: dict[int, tuple[object, ...]], shift: int) -> bool:
    return all(expected.get(number + shift, sign) == sign for number, sign in own.items())


def _is_clear(own: dict[int, tuple[object, ...]], expected: dict[int, tuple[object, ...]], shift: int) -> bool:
    """Whether the shift fits, and is no coincidence of a program that repeats one call."""
    matches = [sign for number, sign in own.items() if expected.get(number + shift) == sign]
    return _agrees(own, expected, shift) and len(matches) > 2 and len(set(matches)) > 1
