"""``--ps RUN_ID``: what the ranks of a run use, in a table that follows the run on a terminal.

Runs in the process that the user started. Reads the run folder only: the launcher is not asked, and may be stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING

from ddplaunch.features.come_back import past_runs
from ddplaunch.features.usage import live_page as page
from ddplaunch.features.usage import usage_reading
from ddplaunch.features.usage.records import PERIOD_S
from ddplaunch.protocol import run_events
from ddplaunch.system.files import kept_files, run_json
from ddplaunch.system.files.run_folders import find
from ddplaunch.text import elapsed, escape

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddplaunch.features.usage.usage_reading import NodeSamples
    from ddplaunch.launcher.request import Request
    from ddplaunch.system.files.run_folders import RunFolder

_MAX_EVENT_BYTES = 32 << 20
_LEAST_ROWS = 4


def live(request: Request) -> None:
    """Show the run's table: once, or on a terminal every 2 s until the run ends or the user leaves with Ctrl-C.

    Raises:
        UsageError: there is no such run.
        LaunchError: it keeps no files.
    """
    run = find("--ps", request.value, request.log_dir)
    table = _Table(run)
    with contextlib.suppress(KeyboardInterrupt):
        if os.isatty(1) and run.is_running():
            table.follow()
        request.show(table.ended() if not run.is_running() else "\n".join(table.lines(None, None)))


class _Table:
    """The table of one run."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._known: dict[Path, NodeSamples] = {}
        self._started_s = run_json.seconds(run.started, "start") or time.time()

    def lines(self, columns: int | None, rows: int | None) -> list[str]:
        """The table of now, for a terminal of this size; None: all ranks, in lines of any length."""
        now = time.time()
        folders = self._run.of_all_launchers()  # A launcher may have joined.
        nodes = usage_reading.files(folders, self._known)
        ranks = page.ranks(nodes, _failed(folders, page.newest_attempt(nodes)), now)
        title = page.title(self._run.run_id, max(0.0, now - self._started_s), nodes, ranks, now)
        table = page.rank_table(ranks) if ranks else []
        if rows is not None and len(table) > rows - 2:
            table = page.node_table(ranks)
            hidden = len(table) - max(rows - 3, _LEAST_ROWS)
            table = [*table[:-hidden], f"... and {hidden} more nodes"] if hidden > 0 else table
        return [escape(line)[:columns] for line in (title, *table)]

    def follow(self) -> None:
        """Show the table in the same place until the run ends."""
        shown = 0
        while True:
            size = os.get_terminal_size(1)
            lines = self.lines(size.columns or None, size.lines or None)
            up = f"\x1b[{shown}F" if shown else ""
            sys.stdout.write(up + "".join(f"\x1b[K{line}\n" for line in lines) + "\x1b[J")
            sys.stdout.flush()
            shown = len(lines)
            due = time.monotonic() + PERIOD_S
            while time.monotonic() < due:
                if not self._run.is_running():
                    return
                time.sleep(PERIOD_S / 8)

    def ended(self) -> str:
        """How a run has ended, and where its files are."""
        if problem := self._run.unknown():
            there = f"ssh -t {self._run.other_host} ddplaunch --ps {self._run.run_id}"
            return f"{self._run.run_id}: {problem}; there: {there}"
        found = past_runs.of_launchers(self._run.of_all_launchers())
        took = f" after {elapsed(found.duration_s)}" if found.duration_s is not None else ""
        lines = [f"{self._run.run_id}: ended{took}: {found.result}", *([found.cause] if found.cause else [])]
        return "\n".join((*lines, f"its files: {self._run.name}"))


def _failed(folders: Iterable[Path], attempt: int | None) -> frozenset[int]:
    """The ranks that have failed in ``attempt``, as far as the launchers have written it."""
    return frozenset(rank for folder in folders for rank in _failed_ranks(folder, attempt))


def _failed_ranks(folder: Path, attempt: int | None) -> list[int]:
    ranks = []
    with contextlib.suppress(OSError), kept_files.open_regular(folder / run_events.FILE) as file:
        for line in file.read(_MAX_EVENT_BYTES).splitlines():
            if b'"worker_failed"' in line:
                with contextlib.suppress(ValueError, RecursionError, AttributeError):
                    event = json.loads(line)
                    if event.get("attempt") == attempt and type(event.get("rank")) is int:
                        ranks.append(event["rank"])
    return ranks
