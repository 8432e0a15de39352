"""The usage samples of all nodes, in the launcher: loads what writes them when the first one comes.

Runs in the launcher, in the main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.features.usage import UsageRecord
from ddplaunch.launcher.watches import RunServices, Watch

if TYPE_CHECKING:
    from ddplaunch.features.usage.usage_files import UsageFiles
    from ddplaunch.protocol.run_result import RunResult


class UsageWatch(Watch):
    """Loads ``UsageFiles`` for the first record that is to be written: a short run has none."""

    def __init__(self, run: RunServices) -> None:
        self._run = run
        self._files: UsageFiles | None = None

    def on_event(self, index: int, event: object) -> None:
        """A record of node ``index``; other events have no effect."""
        if isinstance(event, UsageRecord) and self._run.folder():
            if self._files is None:
                from ddplaunch.features.usage.usage_files import UsageFiles

                self._files = UsageFiles(self._run)
            self._files.on_event(index, event)

    def add_to_result(self, result: RunResult) -> RunResult:
        """Write what has not been written yet."""
        if self._files:
            self._files.close()
        return result


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (UsageWatch(run),)
