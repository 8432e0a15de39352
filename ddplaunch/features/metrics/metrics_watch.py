"""``--metrics-file``: writes what is known of the run for Prometheus, every 10 s and at the end.

Runs in the launcher, in the main thread; a short thread writes, because a disk may be slow: while it does, no other is
started. The file is renamed into place: a reader sees all of it. After the end it has the outcome, and nothing about
nodes, workers and GPUs, which are no longer known.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.features.metrics.metrics import NodeMetrics, RunMetrics, text
from ddplaunch.features.metrics.metrics_file import write
from ddplaunch.features.usage.records import UsageSampled, UsageStarted
from ddplaunch.launcher.watches import Watch
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted
from ddplaunch.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ddplaunch.launcher.participants import Participants
    from ddplaunch.protocol.results import RunResult

_NEVER = float("inf")
PERIOD_S = 10.0
_CLOSE_S = 2.0


class MetricsWatch(Watch):
    """Watches one run."""

    def __init__(
        self, path: Path, run_id: Callable[[], str], participants: Participants, show: Callable[[str, int], None]
    ) -> None:
        """``run_id`` returns the run's: nodes may agree on another one."""
        self._path, self._run_id = path, run_id
        self._participants, self._show = participants, show
        self._run = RunMetrics(run_id(), __version__, time.time())
        self._of_node: dict[int, NodeMetrics] = {}
        self._restarts: set[int] = set()
        self._due = time.monotonic()
        self._writer: threading.Thread | None = None
        self._error: OSError | None = None
        self._is_warned = False

    def on_event(self, index: int, _participants: Sequence[int], event: object) -> None:
        """An event of node ``index``; other events have no effect."""
        match event:
            case AttemptStarted(attempt=attempt, world_size=world_size) if attempt >= (self._run.attempt or 0):
                self._run.state, self._run.attempt, self._run.workers = "running", attempt, world_size
            case AttemptEnded(result=result) if result.restart_follows:
                self._restarts.add(result.attempt)
            case UsageStarted():
                before = self._of_node.get(index)
                totals = before.totals if before and before.started.ranks == event.ranks else {}
                self._of_node[index] = NodeMetrics(
                    index, self._participants.nodes.all[index].host, event, totals=totals
                )
            case UsageSampled(attempt=attempt, samples=samples):
                node = self._of_node.get(index)
                if node and node.started.attempt == attempt:
                    node.add(samples)

    def run_due(self, now: float) -> float:
        """Write the file, if it is time. Returns when to call again."""
        if now >= self._due:
            self._due = now + PERIOD_S
            self._warn()
            if self._writer is None or not self._writer.is_alive():
                self._start(self._text())
        return self._due

    def _text(self) -> str:
        self._run.run_id, self._run.update_s = self._run_id(), time.time()
        self._run.restarts, self._run.nodes = len(self._restarts), len(self._participants.indices)
        known = [self._of_node[index] for index in self._participants.indices if index in self._of_node]
        return text(self._run, known)

    def _start(self, content: str) -> None:
        def run() -> None:
            try:
                write(self._path, content)
            except OSError as error:
                self._error = error

        self._writer = threading.Thread(target=run, name="metrics", daemon=True)
        try:
            self._writer.start()
        except RuntimeError:  # The limit of threads.
            self._writer = None

    def _warn(self) -> None:
        if self._error and not self._is_warned:
            self._is_warned = True
            self._show(f"--metrics-file {self._path}: {self._error.strerror}; the job goes on", Level.ALWAYS)

    def on_agents_ended(self, result: RunResult) -> RunResult:
        """The run has ended: write the outcome. Waits up to ``_CLOSE_S`` for the disk."""
        self._of_node, self._due = {}, _NEVER
        self._run.state, self._run.end_s, self._run.exit_code = "ended", time.time(), result.exit_code
        if self._writer:
            self._writer.join(_CLOSE_S)
        if self._writer is None or not self._writer.is_alive():
            self._start(self._text())
        if self._writer:
            self._writer.join(_CLOSE_S)
        self._warn()
        return result
