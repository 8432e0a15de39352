"""A line that tells how far something has come: rewritten on a terminal, elsewhere told anew if it takes long."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.launcher.console import Console

_REWRITE_S = 0.25
"""Also how long it takes before the first is shown: what is done at once needs no word."""

_FIRST_S, _AGAIN_S = 5.0, 10.0


class Progress:
    """Of one thing at a time. Main thread only; times are ``time.monotonic()``'s."""

    def __init__(self, console: Console, *, is_quiet: bool) -> None:
        self._console = console
        self._is_quiet = is_quiet
        self._due: float | None = None

    def show(self, text: Callable[[], str]) -> float:
        """It goes on, and this is how far it has come, if that is to be told now. Returns when to call again."""
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
                self._console.say(line)
        return self._due

    def end(self) -> None:
        """It is over; the next one may begin."""
        if self._due is not None and self._console.has_progress:
            self._console.progress("")
        self._due = None


def _columns() -> int:
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80
