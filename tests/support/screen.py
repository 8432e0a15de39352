"""A terminal as a place for output: what it shows is collected as it comes, half lines and all.

``terminal.py`` next door is for what the keyboard does to the run; there the lines are those of ``Running``.
"""

from __future__ import annotations

import os
import pty
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import wait_until
from tests.support.runs import TIMEOUT_S, Running, start

CTRL_C, CTRL_S, CTRL_Q = b"\x03", b"\x13", b"\x11"


class Screen:
    """A pseudo-terminal with a reader. Close it when its processes have ended."""

    def __init__(self) -> None:
        self._master, self._fd = pty.openpty()
        self._shown = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 1 << 16):
                self._shown += data
        except OSError:  # Nobody has the other side open any more.
            pass

    def start(self, *arguments: str | Path, under: Sequence[str] = ("setsid", "--ctty"), **options: Any) -> Running:
        """Start ddplaunch on it, as a shell does: Ctrl-C reaches it."""
        return start(*arguments, under=under, **{**self.streams, **options})

    @property
    def streams(self) -> dict[str, int]:
        """Descriptors for a process whose terminal it is."""
        return {"stdin": self._fd, "stdout": self._fd, "stderr": self._fd}

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    @property
    def shown(self) -> bytes:
        """What it has shown, newlines as they were written."""
        return bytes(self._shown).replace(b"\r\n", b"\n")

    def wait_for(self, text: bytes, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until ``text`` was shown."""
        text, searched = text.replace(b"\n", b"\r\n"), 0

        def is_shown() -> bool:
            nonlocal searched
            start, searched = max(0, searched - len(text)), len(self._shown)
            return self._shown.find(text, start) >= 0

        try:
            wait_until(is_shown, timeout_s)
        except TimeoutError:
            raise TimeoutError(f"{text!r} not shown but\n{self.shown.decode(errors='replace')[-4000:]}") from None

    def close(self) -> bytes:
        """Hang up, once its processes have ended. Returns all it has shown."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._thread.join(10)  # Reads up to the end.
            os.close(self._master)
        return self.shown
