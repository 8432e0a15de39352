"""Shows the workers' lines and our own messages. One thread writes; a stopped terminal holds up nothing else."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from ddplaunch.launcher.screen import Screen

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.launcher.line_style import Style
    from ddplaunch.records import Output

_LAST_WORDS_S = 1.0


class Console:
    """Any thread may call ``output`` and ``say``; neither ever blocks. Create it before the handles."""

    def __init__(self, style: Style, stdout_fd: int = 1, stderr_fd: int = 2) -> None:
        self._stderr = Screen(stderr_fd, style)
        one = _is_same_file(stdout_fd, stderr_fd)
        self._stdout = self._stderr if one else Screen(stdout_fd, style, self._stdout_fails)

    def no_prefix(self) -> None:
        """A lone worker's lines are shown as they are."""
        self._stdout.is_plain = self._stderr.is_plain = True

    def output(self, header: Output, data: bytes) -> None:
        """Queue lines of a worker; they are counted instead while the screen is far behind."""
        (self._stdout if header.stream == "stdout" else self._stderr).output(header, data)

    def say(self, text: str) -> None:
        """Queue lines of our own, on stderr."""
        self._stderr.say(text.encode("utf-8", "backslashreplace") + b"\n")

    @property
    def has_progress(self) -> bool:
        """Stderr is a terminal, on which ``progress`` can be shown."""
        return self._stderr.is_terminal

    def progress(self, text: str) -> None:
        """Show this on a line of its own until anything else is to be shown, in place of the last one."""
        self._stderr.progress(text)

    def _stdout_fails(self, reason: str) -> None:
        self.say(f"ddplaunch: stdout cannot be written: {reason}; the job goes on")

    def drain(self, interrupted: Callable[[], bool], stall_s: float) -> None:
        """Wait until all is shown; give up after ``stall_s`` in which nothing was, or when ``interrupted()``.

        What stdout did not take is then counted on stderr, if that works.
        """
        screens = (self._stdout, self._stderr)
        written, deadline = -1, 0.0
        while not all(screen.wait(0.05) for screen in screens) and not interrupted():
            now = sum(screen.written for screen in screens)
            if written != now:
                written, deadline = now, time.monotonic() + stall_s
            elif time.monotonic() > deadline:
                break
        if self._stderr.wait(0.0):
            for lost in self._stdout.give_up():
                self._stderr.say(lost)
            self._stderr.wait(_LAST_WORDS_S)

    def close(self) -> None:
        """End the threads, once they have shown what there is; nothing more may come."""
        self._stdout.close()
        self._stderr.close()


def _is_same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:  # One of them is closed.
        return False
