"""A real terminal, of which the program under test has the keyboard."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.runs import Running, start

CTRL_C = b"\x03"
CTRL_BACKSLASH = b"\x1c"


class Terminal:
    """The other end of a pseudo-terminal: what a person would type and see."""

    def __init__(self) -> None:
        self._master, self._slave = pty.openpty()
        self._reader = threading.Thread()
        self._closing = False

    def start(self, *arguments: str | Path, **options: Any) -> Running:
        """Start ddplaunch as the terminal's foreground process; its lines are what the screen shows."""
        running = start(
            *arguments,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            **options,
        )
        os.close(self._slave)
        self._slave = -1
        self._reader = threading.Thread(target=self._read, args=(running.lines,), daemon=True)
        running.read_by(self._reader)
        return running

    def _read(self, lines: list[str]) -> None:
        rest = b""
        # The last process that has the terminal open is gone: EIO.
        with contextlib.suppress(OSError):
            while not self._closing:
                if select.select([self._master], [], [], 0.02)[0]:
                    *whole, rest = (rest + os.read(self._master, 1 << 16)).split(b"\n")
                    lines.extend(line.decode("utf-8", "replace").rstrip("\r") for line in whole)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def close(self) -> None:
        """As when the window is closed: SIGHUP to the foreground process."""
        # A read that goes on would keep the terminal open.
        self._closing = True
        if self._reader.ident:
            self._reader.join()
        for fd in (self._master, self._slave):
            if fd >= 0:
                os.close(fd)
        self._master = self._slave = -1


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    """A terminal that is closed at the end, if it is not yet."""
    opened = Terminal()
    try:
        yield opened
    finally:
        opened.close()
