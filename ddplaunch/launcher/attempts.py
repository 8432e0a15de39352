"""The attempts of a run as its nodes tell of them, each put together from the nodes that took part. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddplaunch.model import AttemptResult, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass
class _Open:
    """An attempt of which not all nodes have told the end."""

    missing: set[int]
    results: list[AttemptResult] = field(default_factory=list)


class Attempts:
    """Collects what the nodes tell; every call returns the attempts that it completes.

    Attributes:
        ended: the complete ones, in their order.
    """

    def __init__(self) -> None:
        self.ended: list[AttemptResult] = []
        self._open: dict[int, _Open] = {}

    @property
    def next_number(self) -> int:
        """The first attempt that nobody has heard of."""
        return max([*self._open, *(result.attempt for result in self.ended)], default=-1) + 1

    @property
    def restarts(self) -> int:
        """How many attempts have failed and are tried again."""
        going_on = sum(any(map(is_tried_again, opened.results)) for opened in self._open.values())
        return sum(map(is_tried_again, self.ended)) + going_on

    @property
    def are_decided(self) -> bool:
        """A node has told of the run's end: no other attempt follows."""
        results = [*self.ended, *(result for opened in self._open.values() for result in opened.results)]
        return any(not result.restarts for result in results)

    def started(self, number: int, seats: Sequence[int]) -> tuple[bool, list[AttemptResult]]:
        """A node's workers run; whether it is the first node to say so. ``seats`` are all that take part."""
        is_new = number not in self._open
        return is_new, self._reach(number, seats)

    def over(self, node: int, result: AttemptResult, seats: Sequence[int]) -> list[AttemptResult]:
        """A node's workers are gone."""
        completed = self._reach(result.attempt, seats)
        opened = self._open.get(result.attempt)
        if opened is None:  # Of an attempt that was given up, its node came late.
            return completed
        opened.results.append(result)
        return completed + self._left(node)

    def lost(self, node: int) -> list[AttemptResult]:
        """A node will tell nothing more."""
        return self._left(node)

    def close(self) -> list[AttemptResult]:
        """No node will tell anything more."""
        return self._complete(list(self._open))

    def _reach(self, number: int, seats: Sequence[int]) -> list[AttemptResult]:
        """Whoever is in an attempt has left those before."""
        if number >= self.next_number:
            self._open[number] = _Open(set(seats))
        return self._complete([earlier for earlier in self._open if earlier < number])

    def _left(self, node: int) -> list[AttemptResult]:
        for opened in self._open.values():
            opened.missing.discard(node)
        return self._complete([number for number, opened in self._open.items() if not opened.missing])

    def _complete(self, numbers: Iterable[int]) -> list[AttemptResult]:
        results = [self._open.pop(number).results for number in sorted(numbers)]
        completed = [_together(parts) for parts in results if parts]
        self.ended += completed
        return completed


def is_tried_again(result: AttemptResult) -> bool:
    """A failed attempt that another one follows; not one that ended because nodes came or went."""
    return result.restarts and (result.outcome == "failed" or result.cause is not None)


def _together(parts: Sequence[AttemptResult]) -> AttemptResult:
    """One result of all nodes'. They agree on what follows; one that has not heard the verdict expects to go on."""
    if len(parts) == 1:
        return parts[0]
    outcomes = {part.outcome for part in parts}
    outcome: Outcome = "failed" if "failed" in outcomes else "stopped" if "stopped" in outcomes else "succeeded"
    restarts = all(part.restarts for part in parts)
    exits = sorted((exit_ for part in parts for exit_ in part.exits), key=lambda exit_: exit_.rank)
    return replace(
        parts[0],
        outcome=outcome,
        exits=tuple(exits),
        duration_s=max(part.duration_s for part in parts),
        restarts=restarts,
        note=next((part.note for part in parts if part.note and part.restarts == restarts), ""),
        cause=next((part.cause for part in parts if part.cause), None),
        hung=any(part.hung for part in parts),
    )
