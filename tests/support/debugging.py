"""A terminal on which somebody debugs a job."""

from __future__ import annotations

import fcntl
import struct
import termios

from tests.support.processes import wait_until
from tests.support.screen import Screen

PROMPT = b"(Pdb) "
_PROMPT_S = 60.0

STOP = """
import os, sys
rank = int(os.environ["RANK"])
print("before", rank)
x = rank * 10 + 7
if os.environ["RANK"] in sys.argv[1:]:
    breakpoint()
print("after", rank)
"""
"""Stops in the ranks that its arguments name, at line 7."""


class Debugger(Screen):
    """A terminal on which a debugger is used."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self.settings()
        self._seen = 0

    def settings(self) -> list[object]:
        """What the terminal does with keys and output."""
        return termios.tcgetattr(self._fd)

    def resize(self, rows: int, columns: int) -> None:
        """As when the user changes the size of the window."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def prompted(self) -> bytes:
        """Wait for the next prompt; returns what was shown since the last one."""
        wait_until(lambda: PROMPT in self.shown[self._seen :], _PROMPT_S, "no prompt")
        start, self._seen = self._seen, self.shown.index(PROMPT, self._seen) + len(PROMPT)
        return self.shown[start : self._seen]

    def enter(self, line: str) -> None:
        """Type a line."""
        self.type(line.encode() + b"\n")

    def say(self, line: str) -> bytes:
        """Type a line at the prompt; returns what is shown up to the next one."""
        self.enter(line)
        return self.prompted()
