"""Since when no worker of the job has written output or called a collective: ``quiet`` and ``active`` of events.jsonl.

Runs in the launcher, in the main thread. Must not decide anything: ``HangWatch`` does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.records import WorkerActivity
from ddplaunch.launcher.watches import Watch
from ddplaunch.protocol.launcher_agent import AttemptEnded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.protocol.launcher_agent import Report

QUIET_S = 60.0
"""Seconds without output and collectives after which a job is called quiet."""


class QuietTime(Watch):
    """The quiet times of one run."""

    def __init__(self, add: Callable[..., None]) -> None:
        """``add`` writes an event, as ``Watches.note``."""
        self._add, self._attempt = add, -1
        self._since: dict[int, float] = {}
        """By node whose workers run and are quiet."""
        self._finished: set[int] = set()
        """The nodes on which the attempt has ended: those that go on may be quiet."""
        self._known_since: float | None = None

    def on_event(self, _index: int, event: object) -> None:
        """The attempt has ended on a node, and so on all: an agent waits for the verdict first."""
        if isinstance(event, AttemptEnded):
            self._end(time.time())

    def on_report(self, index: int, participants: Sequence[int], report: Report) -> None:
        """For how long the workers of a node have been quiet."""
        if not isinstance(report, WorkerActivity):
            return
        now_s = time.time()
        if report.attempt > self._attempt:
            self._end(now_s)
            self._attempt, self._since, self._finished = report.attempt, {}, set()
        if report.attempt < self._attempt:
            return
        self._since.pop(index, None)
        if report.is_finished:
            self._finished.add(index)
        elif not report.quiet_s:
            self._end(now_s)
        else:
            self._on_quiet(index, participants, report.quiet_s, now_s)

    def _on_quiet(self, index: int, participants: Sequence[int], quiet_s: float, now_s: float) -> None:
        self._since[index] = now_s - quiet_s
        count = len(participants) - len(self._finished)
        if quiet_s < QUIET_S or len(self._since) < count:  # Most reports: no look at all nodes.
            return
        running = {*participants} - self._finished
        if self._since.keys() >= running and now_s - max(self._since[each] for each in running) >= QUIET_S:
            self._begin()

    def on_hang(self) -> None:
        """The user is told that the job hangs: it is quiet, also if that is for a short time only."""
        if self._since:
            self._begin()

    def _begin(self) -> None:
        if self._known_since is None:
            self._known_since = max(self._since.values())
            self._add("quiet", "", self._known_since, attempt=self._attempt)

    def _end(self, now_s: float) -> None:
        """The job is no longer quiet, or its attempt has ended."""
        since, self._known_since = self._known_since, None
        if since is not None:
            self._add("active", "", now_s, attempt=self._attempt, s=round(now_s - since, 3))
