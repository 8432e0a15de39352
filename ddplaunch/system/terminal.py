"""The terminal of this process, which it can leave: it then neither reads nor writes it, and survives its end.

Used by the launcher, in the main thread.
"""

from __future__ import annotations

import os
import signal

is_own = False
"""Whether this process is the command ``ddplaunch``: the terminal of another program is not ours to leave."""


def leave() -> None:
    """Ignore SIGHUP, and use /dev/null for the standard streams that are a terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        if os.isatty(fd):
            os.dup2(null, fd)
    os.close(null)
