"""The progress line: rewritten in place on a terminal, elsewhere a new line every few seconds.

Runs in the launcher, in the main thread. Decides when progress is shown; the caller provides the text.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.launcher.display.console import Console

_REWRITE_S = 0.25
"""Seconds between two versions of the line on a terminal, and before the first: short activities show no line."""

_FIRST_S, _AGAIN_S = 5.0, 10.0


class Progress:
    """Shows the progress of one activity at a time. Times are ``time.monotonic()``'s."""

    def __init__(self, console: Console, *, is_quiet: bool) -> None:
        self._console = console
        self._is_quiet = is_quiet
        self._due: float | None = None

    def show(self, text: Callable[[], str]) -> float:
        """The activity is in progress: show ``text()`` if a line is due. Returns when to call again."""
        if self._is_quiet:
            return float("inf")
        now, is_rewritten = time.monotonic(), self._console.has_progress
        if self._due is None:
            self._due = now + (_REWRITE_S if is_rewritten else _FIRST_S)
        elif now >= self._due:
            self._due = now + (_REWRITE_S if is_rewritten else _AGAIN_S)
            line = f"ddplaunch: {text()}"
            if is_rewritten:
                self._console.progress(line[: _columns() - 1])
            else:
                self._console.show(line)
        return self._due

    def end(self) -> None:
        """The activity is over: remove its line."""
        if self._due is not None and self._console.has_progress:
            self._console.progress("")
        self._due = None


def _columns() -> int:
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80
