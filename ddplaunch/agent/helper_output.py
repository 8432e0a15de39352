"""What the helpers of an agent write: the process of the workers' store, and the member of the rendezvous.

Runs in the agent, with one thread per helper.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from ddplaunch.agent.workers.output import LogFile
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.system.files import kept_files
from ddplaunch.threads import in_thread

_LINE_BYTES = 4096
"""A longer line of a helper counts as several."""

_STACK_LINE = re.compile(rb"(frame #\d+: |Exception raised from |<omitting python frames>).*|\s*")
"""Of the stack that C++ writes behind an error, such as the end of a connection: the line before says what it is."""

_MAX_NOTICES = 100
"""Lines of a helper that the launcher gets; the file has all."""


class HelperOutput:
    """What one helper writes.

    Mostly warnings of torch. They are no messages of ddplaunch: they go into a file of the run folder, and with -v they
    are shown under the helper's name, without stacks of C++. A daemon thread reads the pipe until its end. Main thread
    only.

    Attributes:
        fd: for the helper's stdout and stderr; whoever starts the helper closes it.
    """

    def __init__(self, title: str, file: Path | None, send: Callable[[Notice], None]) -> None:
        """``file`` is created at the first line, also if its folder has been moved; None: there is no file.

        ``send`` is called in the thread.

        Raises:
            RuntimeError: no room for a thread.
        """
        self._title, self._send = title, send
        self._last_line = ""
        reader, self.fd = os.pipe()
        movable = _movable(file)
        self._thread = in_thread(title, lambda: self._read_all(reader, movable))

    def last_line(self, timeout_s: float) -> str:
        """The last line of a helper that has ended, but none of a stack of C++.

        Waits for at most ``timeout_s`` for the end of the pipe.
        """
        self._thread.join(timeout_s)
        return self._last_line

    def _read_all(self, reader: int, file: Path | None) -> None:
        log: LogFile | None = None
        with os.fdopen(reader, "rb") as stream:
            shown = 0
            for line in iter(lambda: stream.readline(_LINE_BYTES), b""):
                if file:
                    log = log or LogFile(file, self._show)
                    log.write(line)
                if _STACK_LINE.fullmatch(line.rstrip(b"\n")):
                    continue
                self._last_line = line.decode("utf-8", "backslashreplace").rstrip("\n")
                if shown < _MAX_NOTICES:
                    self._show(self._last_line)
                shown += 1
        if log:
            log.close()
        if file:
            kept_files.close(int(file.parent.name))

    def _show(self, text: str) -> None:
        self._send(Notice(f"{self._title}: {text}", 1))


def _movable(file: Path | None) -> Path | None:
    """``file`` below a descriptor of its folder: the path stays right when the folder is moved."""
    if file:
        with contextlib.suppress(OSError):  # The disk is full, and the workers' logs have no folder either.
            file.parent.mkdir(exist_ok=True, mode=0o700)
            return Path(f"/proc/self/fd/{os.open(file.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)}", file.name)
    return None
