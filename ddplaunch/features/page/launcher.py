"""Has run.html made: by child processes with the lowest priority, while the run goes on, and at its end.

Runs in the launcher, in the main thread, but for a thread that waits for each child. The launcher never waits for a
child while workers run, and ends every child; if it is killed, the child ends within ``LIMIT_S`` of
``features.page.make``.
The first page is made after ``FIRST_S``: nobody could open an earlier one. The child for the page of a failure is
started when the workers have failed: it loads its modules while the run ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.launcher.watches import RunEnd, RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.agent_entry import IMPORT_PACKAGE, PACKAGE_ROOT
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted

if TYPE_CHECKING:
    from pathlib import Path


OFF_VARIABLE = "DDPLAUNCH_PAGE"
"""``off``: no page is made, as with ``--no-page``; for a site, or for tests."""

FIRST_S, PERIOD_S = 30.0, 30.0
_PERIOD_PER_COST = 20.0
"""The next page follows after so many times what the last has taken: the pages of a large run cost 5 % of a CPU."""

_POLL_S = 0.02
_SHORT_S = 10.0
"""A run below it has a page only if workers failed, if ``--page`` makes one, or if ``--on-exit`` waits for it."""

_PATIENCE, _LEAST_S, _MOST_S = 20.0, 1.0, 10.0
"""The launcher waits for the last page for 1/20 of the run, and for a time between the two others."""

_START = f"{IMPORT_PACKAGE}; from ddplaunch.features.page.make import main; main()"


class _Child:
    """A process that loads its modules, and makes the page of a folder after ``begin``."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError or RuntimeError: no room for a process or a thread."""
        from ddplaunch.system import processes

        self.ended, self._lock = threading.Event(), threading.Lock()
        self._folder, self._began_at, self.duration_s = folder, time.monotonic(), 0.0
        command = (sys.executable, "-c", _START, PACKAGE_ROOT, str(folder))
        null = subprocess.DEVNULL
        # A socket and no pipe: a write to a child that has ended raises no SIGPIPE.
        self._go, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C on the terminal does not end it.
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=null, stderr=null, start_new_session=True
            )
        processes.watch_exit(self._process.pid, "page", self._on_exit)

    def begin(self) -> None:
        """Make the page now."""
        self._began_at = time.monotonic()
        with contextlib.suppress(OSError), self._go:  # It has ended.
            self._go.send(b"\n", socket.MSG_NOSIGNAL)

    def _on_exit(self) -> None:
        with self._lock:
            self._process.wait()
        for folder in (self._folder, self._folder.parent):  # The page of the whole run may be beside the folder.
            with contextlib.suppress(OSError):  # What it had written when it was killed, named by ``kept_files``.
                for part in folder.glob(f".run.html.{self._process.pid}.*"):
                    part.unlink()
        self.duration_s = time.monotonic() - self._began_at
        self.ended.set()

    def kill(self) -> None:
        """End the process; an earlier page stays."""
        with self._lock:
            self._process.kill()


class RunPage(Watch):
    """The page of one run."""

    def __init__(self, run: RunServices) -> None:
        self._is_on = run.config.output.page and os.environ.get(OFF_VARIABLE) != "off"
        self._folder, self._messages = run.folder, run.messages
        self._is_awaited = bool(run.config.on_exit)
        self._due = NEVER
        self._child: _Child | None = None
        self._prepared: _Child | None = None

    def on_event(self, _index: int, event: object) -> None:
        """The first attempt has started: pages are made from now on. A failed one is the last: a page follows soon."""
        if self._is_on and self._due == NEVER and isinstance(event, AttemptStarted):
            self._due = time.monotonic() + FIRST_S
        if isinstance(event, AttemptEnded) and event.result.outcome == "failed" and not event.result.attempt_follows:
            self._prepare()

    def run_due(self, now: float) -> float:
        """Make the page anew if it is time. Returns when it is time again."""
        if now >= self._due:
            if self._child is None or self._child.ended.is_set():
                cost_s = self._child.duration_s if self._child else 0.0
                self._due = now + max(PERIOD_S, _PERIOD_PER_COST * cost_s)
                self._start()
            else:
                self._due = now + PERIOD_S
        return self._due

    def _prepare(self) -> None:
        is_ready = self._prepared is not None and not self._prepared.ended.is_set()
        if self._is_on and not is_ready and (folder := self._folder()):
            with contextlib.suppress(OSError, RuntimeError):  # No page, then: the run matters more.
                self._prepared = _Child(folder)

    def _start(self) -> None:
        self._prepare()
        self._child, self._prepared = self._prepared, None
        if self._child:
            self._child.begin()

    # The end of the run.

    def on_run_ended(self, end: RunEnd) -> None:
        """The report is written: begin to make the last page. A run below ``_SHORT_S`` has one if workers failed."""
        have_failed = end.result.outcome == "failed" and bool(end.result.attempts)
        self._due = NEVER
        if self._child:  # It would not have the report, and could replace the last page.
            self._child.kill()
        self._child = None
        if end.result.duration_s >= _SHORT_S or self._is_awaited or have_failed:
            self._start()
        elif self._prepared:
            self._prepared.kill()

    def finish(self, end: RunEnd) -> None:
        """Wait for the last page, unless it takes too long for the run. If an older one stays, a line says so."""
        limit_s = _MOST_S if self._is_awaited else min(_MOST_S, max(_LEAST_S, end.result.duration_s / _PATIENCE))
        deadline = time.monotonic() + limit_s
        while self._child and not self._child.ended.wait(_POLL_S):
            if end.is_interrupted():
                self._child.kill()
            elif time.monotonic() > deadline:
                self._child.kill()
                deadline = NEVER
                self._show_given_up(end)

    def _show_given_up(self, end: RunEnd) -> None:
        from ddplaunch.features.page.make import FILE

        folder = self._folder()
        if folder and os.path.exists(folder / FILE):
            text = f"{FILE} is older than the end of the run: its last version took too long"
            self._messages.show(f"{text}; `ddplaunch --page {end.result.run_id}` makes it anew", Level.NORMAL)
            self._messages.drain(end.result, end.is_interrupted)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (RunPage(run),)
