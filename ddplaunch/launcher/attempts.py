"""The attempts of a run: merges the nodes' reports about an attempt into one result, and adds up their restarts.

Runs in the launcher. Pure. It does not decide what follows an attempt: the coordinator does (``rounds/verdicts.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import takewhile

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.launcher_agent import Report
from ddplaunch.protocol.results import AttemptResult, Outcome

_PAST_ALL_ATTEMPTS = sys.maxsize
"""A node that has gone has passed all attempts."""


@dataclass
class _OpenAttempt:
    """An attempt whose end has not been reported by all nodes.

    Attributes:
        missing: the nodes that may still report its end.
        results: by node.
    """

    missing: set[int]
    results: dict[int, AttemptResult] = field(default_factory=dict)
    evidence: list[Report] = field(default_factory=list)

    @property
    def restart_follows(self) -> bool:
        """Whether a restart follows, as far as the nodes have reported."""
        parts = self.results.values()
        return any(part.restart_follows for part in parts) and all(part.attempt_follows for part in parts)


class Attempts:
    """Collects the nodes' reports. A method that may complete attempts returns the completed attempts, in order.

    ``node`` is a node's index, ``participants`` are the indices of all participants. Each node has a channel of its
    own: the reports of one node arrive in order, but one node may be in the next attempt before another node's report
    of the last one is read. Neither the results nor the counts depend on the order of arrival.

    Attributes:
        ended: the complete attempts, in order.
        next_number: number of the first attempt that no node has started.
        outcome_is_known: a node has reported that no further attempt follows.
    """

    def __init__(self, explain: Callable[[AttemptResult, Sequence[Report]], AttemptResult]) -> None:
        """``explain`` adds to a complete result what follows from what the nodes have sent with theirs."""
        self._explain = explain
        self.ended: list[AttemptResult] = []
        self.next_number = 0
        self.outcome_is_known = False
        self._open: dict[int, _OpenAttempt] = {}
        self._may_report_from: dict[int, int] = {}
        """By node: the first attempt of which it may still report the end; 0 unless it has been heard."""

    @property
    def restart_count(self) -> int:
        """Number of failed attempts after which the workers were, or are being, restarted."""
        still_open = sum(opened.restart_follows for opened in self._open.values())
        return sum(result.restart_follows for result in self.ended) + still_open

    def on_started(self, node: int, number: int, participants: Sequence[int]) -> tuple[bool, list[AttemptResult]]:
        """A node's workers run. The first value is whether this node is the first to report this attempt."""
        is_first = number not in self._open and number >= self.next_number
        return is_first, self._enter(node, number, participants)

    def on_ended(
        self, node: int, result: AttemptResult, participants: Sequence[int], evidence: Iterable[Report] = ()
    ) -> list[AttemptResult]:
        """A node's workers have ended; ``evidence``: what parts of features have sent with the result.

        No effect if the node has gone, or has been in a later attempt, or has reported the end of this one.
        """
        number = result.attempt
        if number < self._may_report_from.get(node, 0):
            return []
        completed = self._enter(node, number, participants)
        self.outcome_is_known |= not result.attempt_follows
        if opened := self._open.get(number):
            opened.results[node] = result
            opened.evidence.extend(evidence)
        else:
            self._add_late(result)
        return completed + self._moved_on_to(node, number + 1)

    def remove_node(self, node: int) -> list[AttemptResult]:
        """A node has gone: it will send no further reports."""
        return self._moved_on_to(node, _PAST_ALL_ATTEMPTS)

    def close(self) -> list[AttemptResult]:
        """No node will send further reports."""
        return self._complete(sorted(self._open))

    def _enter(self, node: int, number: int, participants: Sequence[int]) -> list[AttemptResult]:
        """``node`` is in attempt ``number``: open it. The node has reported all that it knows of earlier ones."""
        self.next_number = max(self.next_number, number + 1)
        if number not in self._open and all(ended.attempt != number for ended in reversed(self.ended)):
            self._open_attempt(number, set(participants))
        if number in self._open and self._may_report(node, number):  # Also one that was removed meanwhile.
            self._open[number].missing.add(node)
        return self._moved_on_to(node, number)

    def _open_attempt(self, number: int, participants: set[int]) -> None:
        for opened in self._open.values():  # A host that could not be used after all takes part in none of them.
            opened.missing &= participants
        self._open[number] = _OpenAttempt({each for each in participants if self._may_report(each, number)})

    def _may_report(self, node: int, number: int) -> bool:
        return self._may_report_from.get(node, 0) <= number

    def _moved_on_to(self, node: int, number: int) -> list[AttemptResult]:
        """``node`` will report no attempt before ``number``. Other nodes' reports of these may be on their way."""
        self._may_report_from[node] = max(number, self._may_report_from.get(node, 0))
        for earlier, opened in self._open.items():
            if earlier < number:
                opened.missing.discard(node)
        return self._complete(list(takewhile(lambda each: not self._open[each].missing, sorted(self._open))))

    def _complete(self, numbers: Sequence[int]) -> list[AttemptResult]:
        closed = [self._open.pop(number) for number in numbers]
        completed = [self._explain(_merge(_in_order(each.results)), each.evidence) for each in closed if each.results]
        self.ended = sorted([*self.ended, *completed], key=lambda result: result.attempt)
        return completed

    def _add_late(self, late: AttemptResult) -> None:
        """A node that was not known to take part tells of an attempt that is complete without it."""
        self.ended = [_merge((each, late)) if each.attempt == late.attempt else each for each in self.ended]


def _in_order(results: Mapping[int, AttemptResult]) -> list[AttemptResult]:
    return [results[node] for node in sorted(results)]


def _merge(parts: Sequence[AttemptResult]) -> AttemptResult:
    """Merge the nodes' results. A node without the verdict expects another attempt; others override that.

    If one node reports a restart, and another one only a new rendezvous, it is a restart.
    """
    if len(parts) == 1:
        return parts[0]
    outcomes = {part.outcome for part in parts}
    outcome: Outcome = "failed" if "failed" in outcomes else "stopped" if "stopped" in outcomes else "succeeded"
    follows = all(part.attempt_follows for part in parts)
    agreed = [part for part in parts if part.attempt_follows == follows]
    agreed.sort(key=lambda part: not part.restart_follows)
    exits = sorted((exit_ for part in parts for exit_ in part.exits), key=lambda exit_: exit_.rank)
    return replace(
        parts[0],
        outcome=outcome,
        exits=tuple(exits),
        duration_s=max(part.duration_s for part in parts),
        attempt_follows=follows,
        restart_follows=follows and any(part.restart_follows for part in parts),
        saved_is_suspect=any(part.saved_is_suspect for part in parts),
        decision=next((part.decision for part in agreed if part.decision), ""),
        reason=next((part.reason for part in agreed if part.reason), ""),
        cause=next((part.cause for part in parts if part.cause), None),
        hung=any(part.hung for part in parts),
        lost_rendezvous=any(part.lost_rendezvous for part in parts),
        node_leaves=next((part.node_leaves for part in parts if part.node_leaves), ""),
    )
