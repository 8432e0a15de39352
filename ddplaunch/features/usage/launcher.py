"""The usage samples of all nodes, in the launcher: loads what writes them when the first one comes.

Runs in the launcher, in the main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.features.usage import UsageRecord
from ddplaunch.launcher.watches import Watch

if TYPE_CHECKING:
    from ddplaunch.features.usage.usage_files import UsageWatch
    from ddplaunch.launcher.watches import RunServices
    from ddplaunch.protocol.results import RunResult


class LateUsageWatch(Watch):
    """Loads ``UsageWatch`` for the first record: a short run has none."""

    def __init__(self, run: RunServices) -> None:
        self._run = run
        self._watch: UsageWatch | None = None

    def on_event(self, index: int, event: object) -> None:
        """A record of node ``index``; other events have no effect."""
        if isinstance(event, UsageRecord):
            if self._watch is None:
                from ddplaunch.features.usage.usage_files import UsageWatch

                is_local = self._run.config.is_local
                self._watch = UsageWatch(self._run.nodes, self._run.folder, is_local=is_local)
            self._watch.on_event(index, event)

    def add_to_result(self, result: RunResult) -> RunResult:
        """Write what has not been written yet."""
        if self._watch:
            self._watch.close()
        return result


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (LateUsageWatch(run),)
