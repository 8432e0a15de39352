"""Notes that a checkpoint is old, and says its age on the failure page. Runs in the launcher, in the main thread."""

from __future__ import annotations

from collections.abc import Sequence

from ddplaunch.features.checkpoint_age.records import CheckpointAge
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.protocol.launcher_agent import Report
from ddplaunch.protocol.results import RunResult
from ddplaunch.text import duration

_OLD_S = 3600.0


class CheckpointWatch(Watch):
    """The last report of each node."""

    def __init__(self, run: RunServices) -> None:
        self._note = run.note
        self._ages: dict[str, float] = {}

    def on_report(self, index: int, participants: Sequence[int], report: Report) -> None:
        """Node ``index`` has looked at its checkpoint; other reports are other features'."""
        if not isinstance(report, CheckpointAge) or report.age_s is None:
            return
        if report.age_s > _OLD_S >= self._ages.get(report.host, 0.0):
            self._note("old_checkpoint", attempt=report.attempt, node=index, age_s=round(report.age_s))
        self._ages[report.host] = report.age_s

    def page_lines(self, result: RunResult) -> Sequence[str]:
        """The age on each node."""
        return [
            "",
            *(f"the checkpoint on {host} is {duration(age_s)} old" for host, age_s in sorted(self._ages.items())),
        ]


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher; none without ``--checkpoint``."""
    return (CheckpointWatch(run),) if run.config.checkpoint else ()
