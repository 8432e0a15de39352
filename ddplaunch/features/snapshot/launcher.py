"""Notes which code a run runs: in report.json, by a link and the differences in the run folder.

Of a run without a snapshot: says at a restart if its code has changed. Runs in the launcher, in the main thread; git in
another one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError, Level
from ddplaunch.features.snapshot.records import DIFF, SnapshotUsed
from ddplaunch.launcher.watches import RunEnd, RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.launcher_agent import AttemptStarted
from ddplaunch.system.files import kept_files
from ddplaunch.text import plural, quote
from ddplaunch.threads import post_from_thread

if TYPE_CHECKING:
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.run_result import RunResult

_CODE_DIFF = "code.diff"
_LOOK_AFTER_S = 3.0


class SnapshotWatch(Watch):
    """The snapshot of this launcher, and what other nodes say of theirs."""

    def __init__(self, run: RunServices, folder: str) -> None:
        from ddplaunch.features.snapshot import copies, old_copies  # Only a run with a snapshot loads what it needs.

        self._messages, self._folder, self._facts, self._copies = run.messages, folder, copies.facts(folder), copies
        self._is_sent = run.config.sync and not run.config.is_local
        self._others: dict[int, str] = {}
        if run_folder := run.folder():
            with kept_files.noting(run_folder / old_copies.LINK):
                os.symlink(folder, run_folder / old_copies.LINK)
            with kept_files.noting(run_folder / _CODE_DIFF):
                if os.path.getsize(os.path.join(folder, DIFF)):
                    shutil.copyfile(os.path.join(folder, DIFF), run_folder / _CODE_DIFF)

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

    def page_lines(self, result: RunResult) -> Sequence[str]:
        """With --sync: what a worker has not found is here, but was not sent."""
        error = result.first_failure and result.first_failure.error
        named = re.search(r"No such file or directory: '([^']+)'", error.message) if error and self._is_sent else None
        if not named:
            return ()
        from ddplaunch.features.snapshot import choice

        with contextlib.suppress(OSError, LaunchError):  # The working directory was deleted.
            if line := choice.not_sent(named[1], self._folder, self._facts):
                return ("", line)
        return ()

    def on_run_ended(self, end: RunEnd) -> None:
        """Say what workers have left in the snapshot here: another run, of other code, will not find it."""
        with contextlib.suppress(OSError, LaunchError):
            names = self._copies.written(self._folder)
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                text = f"the snapshot has what is no code, which runs of other code do not find: {', '.join(names[:3])}"
                self._messages.show(quote(f"{text}{more} in {self._folder}", 1000), Level.NORMAL)


class ChangesWatch(Watch):
    """Says at a restart which files have changed since the start: the attempt runs them as they are now."""

    def __init__(self, run: RunServices) -> None:
        self._messages, self._post, self._config, self._since_ns = run.messages, run.post, run.config, time.time_ns()
        self._attempt, self._look_at = 0, NEVER
        self._told: Sequence[str] = ()

    def on_event(self, index: int, event: object) -> None:
        """Look once for each attempt, when its start is over, which must not be delayed."""
        if isinstance(event, AttemptStarted) and event.attempt > self._attempt:
            self._attempt, self._look_at = event.attempt, time.monotonic() + _LOOK_AFTER_S

    def run_due(self, now: float) -> float:
        """Look, in a thread: the folder may be large, or on a slow file system."""
        if now >= self._look_at:
            self._look_at = NEVER
            post = lambda found: self._post(functools.partial(self._on_found, self._attempt, found))  # noqa: E731
            post_from_thread("changed code", self._changed, post, list[str]())
        return self._look_at

    def _changed(self) -> list[str]:
        from ddplaunch.features.snapshot import code_files

        with contextlib.suppress(LaunchError):
            return code_files.changed_since(code_files.folder_of(self._config), self._since_ns)
        return []

    def _on_found(self, attempt: int, paths: Sequence[str]) -> None:
        if paths and paths != self._told:
            self._told = paths
            named = ", ".join(paths[:3]) + (f" and {plural(len(paths) - 3, 'more file')}" if len(paths) > 3 else "")
            text = (
                f"the code has changed since the run was started, and attempt {attempt} runs it as it is now: {named}"
            )
            self._messages.show(f"{quote(text, 500)}; --snapshot keeps the code of a run", Level.NORMAL)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run with a snapshot, or of one without that may start again."""
    config = run.config
    if config.code:
        return (SnapshotWatch(run, config.code),)
    may_change = config.max_restarts and config.entry in ("script", "module") and not config.each_node_has_launcher
    return (ChangesWatch(run),) if may_change else ()
