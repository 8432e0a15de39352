"""What the end of a round means for all nodes: from how each of them ended to one verdict. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddplaunch import verdict
from ddplaunch.rounds import NodeEnded, RoundOver

if TYPE_CHECKING:
    from ddplaunch.model import WorkerExit


@dataclass
class RoundEnd:
    """What is known of it so far.

    Attributes:
        reason: what ended the round where no worker's failure did.
        has_lost: a node is lost; ``has_joined``: one has come for the next round.
        alarms: nodes that have told of a failure, in the order in which that came here.
        stopped: host of the first node that somebody stopped; empty if none.
    """

    reason: str = ""
    has_lost: bool = False
    has_joined: bool = False
    alarms: list[int] = field(default_factory=list)
    ends: list[NodeEnded] = field(default_factory=list)
    stopped: str = ""

    def verdict(self, attempt: int, *, has_restarts: bool, may_change: bool) -> RoundOver:
        """``has_restarts``: a failure may be tried again; ``may_change``: nodes may go, and the others go on."""
        is_short = self.has_lost or bool(self.stopped)
        failed = any(end.failed and not (is_short and _is_for_want_of_others(end)) for end in self.ends)
        if self.stopped and not failed:
            reason = self.reason or f"{self.stopped} was told to stop"
            return RoundOver(attempt, restarts=False, failed=False, stopped=True, reason=reason)
        if failed:
            again = has_restarts and not self.stopped
            return RoundOver(attempt, restarts=again, failed=True, reason=self.reason, cause=self._cause())
        changed = self.has_lost or self.has_joined
        again = changed and (may_change or not self.has_lost)
        return RoundOver(attempt, restarts=again, failed=changed and not again, reason=self.reason)

    def _cause(self) -> WorkerExit | None:
        """The job's first failure, by the order in which the nodes' alarms came here: no two clocks are compared."""
        order = {index: place for place, index in reversed(list(enumerate(self.alarms)))}
        ends = sorted((end for end in self.ends if end.cause), key=lambda end: order.get(end.node_index, len(order)))
        causes = [end.cause for end in ends if end.cause]
        return min(causes, key=verdict.is_consequence, default=None)


def _is_for_want_of_others(end: NodeEnded) -> bool:
    """Where a node is lost or told to stop, workers of the others miss its workers: that is not a failure of theirs."""
    return end.cause is not None and verdict.is_consequence(end.cause)
