"""Notes which code a run runs: in report.json, by a link and the differences in the run folder. Main thread."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError, Level
from ddplaunch.features.snapshot.records import MARKER, SnapshotUsed
from ddplaunch.launcher.watches import RunEnd, RunServices, Watch
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.run_result import RunResult

_TOUCH_S = 12 * 3600.0
_DIFF = "code.diff"


class SnapshotWatch(Watch):
    """The snapshot of this launcher, and what other nodes say of theirs."""

    def __init__(self, run: RunServices, folder: str) -> None:
        from ddplaunch.features.snapshot import copies  # Only a run with a snapshot loads what it needs.

        self._messages, self._folder, self._facts, self._copies = run.messages, folder, copies.facts(folder), copies
        self._touch_at = time.monotonic() + _TOUCH_S
        self._others: dict[int, str] = {}
        if run_folder := run.folder():
            with kept_files.noting(run_folder / copies.LINK):
                os.symlink(folder, run_folder / copies.LINK)
            with kept_files.noting(run_folder / _DIFF):
                if os.path.getsize(os.path.join(folder, copies.DIFF)):
                    shutil.copyfile(os.path.join(folder, copies.DIFF), run_folder / _DIFF)

    def run_due(self, now: float) -> float:
        """A snapshot that is used is not deleted."""
        if now >= self._touch_at:
            self._touch_at = now + _TOUCH_S
            with contextlib.suppress(OSError):
                os.utime(os.path.join(self._folder, MARKER))
        return self._touch_at

    def on_report(self, node_index: int, participants: Sequence[int], report: Report) -> None:
        """A node has said which code it runs."""
        if not isinstance(report, SnapshotUsed):
            return
        if report.content != self._facts.content and self._others.get(node_index) != report.content:
            self._others[node_index] = report.content
            problem = f"{report.host} (node {node_index}) has taken another snapshot"
            self._messages.show(f"warning: the nodes do not run the same code: {problem}", Level.NORMAL)

    def add_to_result(self, result: RunResult) -> RunResult:
        """The entry in report.json."""
        return replace(result, code=self._copies.of_run(self._folder, self._facts))

    def on_run_ended(self, end: RunEnd) -> None:
        """Say what workers have left in the snapshot: another run, of other code, will not find it."""
        with contextlib.suppress(OSError, LaunchError):
            names = self._copies.written(self._folder)
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                text = f"the snapshot has what is no code, which runs of other code do not find: {', '.join(names[:3])}"
                self._messages.show(quote(f"{text}{more} in {self._folder}", 1000), Level.NORMAL)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run with a snapshot."""
    return (SnapshotWatch(run, run.config.code),) if run.config.code else ()
