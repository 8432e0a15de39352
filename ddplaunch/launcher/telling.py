"""What the user is told while a run goes on and at its end. Main thread only."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.launcher import events, report, report_files
from ddplaunch.launcher.attempts import is_tried_again
from ddplaunch.launcher.progress import Progress
from ddplaunch.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
    from ddplaunch.launcher.console import Console
    from ddplaunch.model import AttemptResult, RunResult

_STALL_S, _STOPPED_STALL_S = 10.0, 2.0
"""How long a screen that takes nothing is waited for at the end; less once the user wants the end."""


class Telling:
    """One run's messages, as far as the user wants them.

    Attributes:
        progress: for what takes its time.
    """

    def __init__(self, config: LaunchConfig, run_id: str, folder: Path | None, console: Console) -> None:
        """``folder`` is the run's, None if no files are kept."""
        self._config = config
        self._run_id = run_id
        self._folder = folder
        self._console = console
        self.progress = Progress(console, is_quiet=config.verbosity < 0)

    @property
    def _is_remote(self) -> bool:
        return bool(self._config.hosts and not self._config.dry_run)

    def say(self, text: str, level: int) -> None:
        """``level``: -1 always, 0 unless quiet, 1 only if verbose."""
        if level <= self._config.verbosity:
            self._console.say(f"ddplaunch: {printable(text)}")

    def begins(self) -> None:
        """Say what happens before the first agent can be heard of."""
        for level, text in self._config.notices:
            self.say(text, level)
        if self._config.dry_run:
            from ddplaunch.launcher.plan import banner

            self.say(banner(self._config), 0)
        if not self._is_remote:
            if self._config.collect_logs:
                self.say("--collect-logs: the logs of all that this launcher starts are here anyway", 1)
            return
        from ddplaunch import forwarding
        from ddplaunch.host_ranges import fold
        from ddplaunch.printable import shown

        count = self._config.max_nodes
        self.say(f"starting on {shown(fold(host.name for host in self._config.hosts[:count]))}", 0)
        for line in forwarding.shown(dict(self._config.remote.environ)):
            self.say(f"forwarded: {line}", 1)

    def nodes_ready(self, local_world_sizes: Mapping[str, int]) -> None:
        """All agents know how many workers they will run; by host."""
        count, nodes = sum(local_world_sizes.values()), len(local_world_sizes)
        if count == 1 and self._config.max_nodes == 1 and self._config.line_prefix is None:
            self._console.no_prefix()
        workers = "1 worker" if count == 1 else f"{count} workers"
        on = next(iter(local_world_sizes)) if nodes == 1 else f"{nodes} nodes"
        are_here = self._config.collect_logs or not self._is_remote
        kept = "logs" if are_here else "logs are on each node, the report"
        where = f"{kept} in {self._folder}" if self._folder else "no logs are kept"
        self.say(f"{workers} on {on}, {where}", 0)

    def attempt_ended(self, result: AttemptResult, restarts: int, *, goes_on: bool) -> None:
        """An attempt is over; ``restarts`` counts the failed ones that are tried again, with this one.

        Its nodes cannot know that the run is ended meanwhile: then it ``goes_on`` no more.
        """
        if self._config.events == "console":
            for line in events.worker_events(self._run_id, self._config.role, result):
                self._console.say(line)
        if not goes_on:
            return
        if is_tried_again(result):
            self.say(f"{report.attempt_line(result)}; restart {restarts} of {self._config.max_restarts}", 0)
        elif result.restarts:
            self.say(f"{result.note}; starting again", 0)

    def _ended(self, result: RunResult) -> None:
        """What there is to say without a failure of the job's own."""
        is_bad = bool(result.left or result.unasked)
        left = f"left: {report.left(result)}" if is_bad else "every process of this run is gone"
        if result.outcome == "stopped":
            why = result.attempts[-1].note if result.attempts and not result.signal else ""
            self.say(f"stopped{why and f', {why}'}; {left}", -1 if why or is_bad else 0)
        elif is_bad:
            self.say(left, -1)

    def end(self, result: RunResult, *, is_explained: bool) -> None:
        """Leave the report and show the page.

        ``is_explained``: what ended the run is no worker's failure, and told elsewhere.
        """
        if self._folder and self._is_remote:
            report_files.write_failures(result, self._folder)
        text = report.page(result, is_remote=self._is_remote) if result.outcome == "failed" and not is_explained else ""
        if self._folder:
            report_files.write(result, self._folder, text)
        report_files.reply(result.first_failure, os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        if text:
            self._console.say(text)
        elif not is_explained:
            self._ended(result)
        for injected in result.injections:
            self.say(f"inject {injected.text}: {injected.account}", 0)

    def drain(self, result: RunResult, interrupted: Callable[[], bool]) -> None:
        """Wait until all is shown, or ``interrupted()``."""
        self._console.drain(interrupted, _STOPPED_STALL_S if result.signal else _STALL_S)
        self._console.close()
