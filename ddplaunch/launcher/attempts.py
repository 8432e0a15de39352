"""The attempts of a run: merges the nodes' reports about an attempt into one result, and counts restarts.

Runs in the launcher. Pure. It does not decide about restarts (``max_restarts``): the agent of a single node does
(``agent/rendezvous/single_node.py``), or the coordinator of several (``rendezvous/coordinator.py``).
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import TYPE_CHECKING

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import first_failure
from ddplaunch.protocol.hang_evidence import RankEvidence
from ddplaunch.protocol.results import AttemptResult, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass
class _OpenAttempt:
    """An attempt whose end has not been reported by all nodes."""

    missing: set[int]
    results: list[AttemptResult] = field(default_factory=list)
    evidence: list[RankEvidence] = field(default_factory=list)


class Attempts:
    """Collects the nodes' reports. A method that may complete attempts returns the completed attempts.

    ``node`` is a node's index, ``participants`` are the indices of all participants.

    Attributes:
        ended: the complete attempts, in order.
    """

    def __init__(self) -> None:
        self.ended: list[AttemptResult] = []
        self._open: dict[int, _OpenAttempt] = {}

    @property
    def next_number(self) -> int:
        """Number of the first attempt that no node has started."""
        return max([*self._open, *(result.attempt for result in self.ended)], default=-1) + 1

    @property
    def restart_count(self) -> int:
        """Number of failed attempts after which the workers were, or are being, restarted."""
        still_open = sum(any(result.restart_follows for result in opened.results) for opened in self._open.values())
        return sum(result.restart_follows for result in self.ended) + still_open

    @property
    def outcome_is_known(self) -> bool:
        """Whether a node has reported that no further attempt follows."""
        results = [*self.ended, *(result for opened in self._open.values() for result in opened.results)]
        return any(not result.attempt_follows for result in results)

    def on_started(self, node: int, number: int, participants: Sequence[int]) -> tuple[bool, list[AttemptResult]]:
        """A node's workers run. The first value is whether this node is the first to report this attempt."""
        is_first = number not in self._open
        return is_first, self._enter(node, number, participants)

    def on_ended(
        self, node: int, result: AttemptResult, participants: Sequence[int], evidence: Iterable[RankEvidence] = ()
    ) -> list[AttemptResult]:
        """A node's workers have ended; ``evidence``: what they knew of their collectives, if these have failed."""
        completed = self._enter(node, result.attempt, participants)
        opened = self._open.get(result.attempt)
        if opened is None:  # The attempt was completed without this node.
            return completed
        opened.results.append(result)
        opened.evidence.extend(evidence)
        return completed + self.remove_node(node)

    def remove_node(self, node: int) -> list[AttemptResult]:
        """A node will send no further reports."""
        for opened in self._open.values():
            opened.missing.discard(node)
        return self._complete_reported()

    def close(self) -> list[AttemptResult]:
        """No node will send further reports."""
        return self._complete(list(self._open))

    def _enter(self, node: int, number: int, participants: Sequence[int]) -> list[AttemptResult]:
        """``node`` is in attempt ``number``: open it. The node has reported all that it knows of earlier ones.

        Another node's report of an earlier attempt may still be on its way: each node has a channel of its own.
        """
        if number >= self.next_number:
            self._open[number] = _OpenAttempt(set(participants))
        for earlier, opened in self._open.items():
            if earlier < number:
                opened.missing &= set(participants) - {node}
        return self._complete_reported()

    def _complete_reported(self) -> list[AttemptResult]:
        return self._complete([number for number, opened in self._open.items() if not opened.missing])

    def _complete(self, numbers: Iterable[int]) -> list[AttemptResult]:
        closed = [self._open.pop(number) for number in sorted(numbers)]
        completed = [_explained(_merge(each.results), each.evidence) for each in closed if each.results]
        self.ended += completed
        return completed


def _explained(result: AttemptResult, evidence: Sequence[RankEvidence]) -> AttemptResult:
    if not evidence or result.outcome == "succeeded":
        return replace(result, collectives=())
    from ddplaunch.hangs.explanation import explain_failure

    failures = first_failure.failures(result.exits)
    causes = [exit_.rank for exit_ in failures if not first_failure.is_consequence(exit_)]
    failed = [exit_.rank for exit_ in failures]
    return replace(result, collectives=explain_failure(evidence, failed, causes))


def _merge(parts: Sequence[AttemptResult]) -> AttemptResult:
    """Merge the nodes' results. A node without the verdict expects another attempt; others override that."""
    if len(parts) == 1:
        return parts[0]
    outcomes = {part.outcome for part in parts}
    outcome: Outcome = "failed" if "failed" in outcomes else "stopped" if "stopped" in outcomes else "succeeded"
    follows = all(part.attempt_follows for part in parts)
    exits = sorted((exit_ for part in parts for exit_ in part.exits), key=lambda exit_: exit_.rank)
    return replace(
        parts[0],
        outcome=outcome,
        exits=tuple(exits),
        duration_s=max(part.duration_s for part in parts),
        attempt_follows=follows,
        reason=next((part.reason for part in parts if part.reason and part.attempt_follows == follows), ""),
        cause=next((part.cause for part in parts if part.cause), None),
        hung=any(part.hung for part in parts),
        lost_rendezvous=any(part.lost_rendezvous for part in parts),
        node_leaves=next((part.node_leaves for part in parts if part.node_leaves), ""),
    )
