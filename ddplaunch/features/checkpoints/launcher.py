"""Tells what the newest checkpoint is, what work is lost when an attempt ends, and which checkpoint may be damaged.

Runs in the launcher, in the main thread. Where each node has a launcher, the one that watches the job gets the reports
of new checkpoints, and that of the node with rank 0 the ends of attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.features.checkpoints.records import CheckpointSeen
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.launcher_agent import AttemptEnded
from ddplaunch.text import duration, quote

if TYPE_CHECKING:
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.results import AttemptResult
    from ddplaunch.protocol.run_result import RunResult


class CheckpointWatch(Watch):
    """Of one run."""

    def __init__(self, run: RunServices) -> None:
        self._run = run
        self._newest: CheckpointSeen | None = None
        self._ended: list[tuple[AttemptResult, CheckpointSeen]] = []
        self._lost_s = 0.0
        self._lost_line = self._suspect = ""

    def on_report(self, node_index: int, participants: Sequence[int], report: Report) -> None:
        """Another checkpoint is the newest."""
        if isinstance(report, CheckpointSeen):
            self._on_seen(report)

    def _on_seen(self, seen: CheckpointSeen) -> None:
        if seen.path and (
            self._newest is None or (seen.path, seen.saved_t) != (self._newest.path, self._newest.saved_t)
        ):
            self._newest = seen
            facts = {"saved_t": seen.saved_t, "attempt": seen.attempt, **({"step": seen.step} if seen.step else {})}
            self._run.messages.show(f"checkpoint: {quote(seen.name, 200)}", Level.VERBOSE, "checkpoint", **facts)

    def on_event(self, index: int, event: object) -> None:
        """The end of an attempt on a node; what is shown of it follows the message about the attempt."""
        if isinstance(event, AttemptEnded):
            for report in event.evidence:
                if isinstance(report, CheckpointSeen):
                    self._on_seen(report)
                    self._ended.append((event.result, report))

    def run_due(self, now: float) -> float:
        """Tell what was lost, below the message about the attempt."""
        while self._ended:
            self._on_ended(*self._ended.pop(0))
        return NEVER

    def on_loop_ended(self) -> None:
        """The last events may have come together."""
        self.run_due(0.0)

    def _on_ended(self, result: AttemptResult, seen: CheckpointSeen) -> None:
        if result.outcome == "succeeded":
            return
        self._lost_s += seen.lost_s
        since = f"since {quote(seen.name, 200)}" if seen.path else "there is no checkpoint"
        self._lost_line = f"work lost: {duration(seen.lost_s)}, {since}"
        facts = {"s": round(seen.lost_s, 1), "attempt": result.attempt}
        level = Level.NORMAL if seen.lost_s >= 1 else Level.VERBOSE
        self._run.messages.show(self._lost_line, level, "work_lost", **facts)
        if result.saved_is_suspect and seen.path and seen.path != self._suspect:
            self._suspect = seen.path
            does = "" if self._run.config.set_aside_bad_checkpoint else "; --set-aside-bad-checkpoint renames it"
            text = f"{quote(seen.name, 200)} may be damaged: two attempts in a row have failed soon after they began"
            self._run.messages.show(
                f"{text} from it, and saved nothing newer{does}", Level.ALWAYS, "checkpoint_suspect"
            )

    def add_to_result(self, result: RunResult) -> RunResult:
        """The newest checkpoint, and all work that was lost."""
        path = self._newest.path if self._newest else None
        return replace(result, checkpoint=path, lost_work_s=round(self._lost_s, 1))

    def page_lines(self, result: RunResult) -> Sequence[str]:
        """What the failure has cost."""
        return ["", self._lost_line] if self._lost_line else []


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (CheckpointWatch(run),)
