"""How far the writer of a pipe may be ahead of its reader."""

from __future__ import annotations

import contextlib
import fcntl

_BYTES = 1 << 20
"""The most an unprivileged process may ask for (pipe(7))."""


def widen(fd: int) -> None:
    """Give a pipe, by either of its ends, much room; what is no pipe stays as it is."""
    with contextlib.suppress(OSError):  # Over the user's pipe quota it stays 64 KiB.
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _BYTES)
