"""Processes of this machine that carry a mark in their environment: found and signalled, whoever started them."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def signal_all(mark: str, signum: int, spare: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Send to every process whose environment at its start held ``mark`` (``NAME=value``), but to ``spare``.

    Returns the pids that got it. What such a process starts meanwhile may be missed.
    """
    return tuple(pid for pid in pids() if pid not in spare and _signalled(pid, os.fsencode(mark), signum))


def _signalled(pid: int, mark: bytes, signum: int) -> bool:
    with pidfd(pid) as fd:
        # Empty for a zombie, and for what is not ours to read.
        if mark not in read(f"/proc/{pid}/environ").split(b"\0"):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if fd is None:
                os.kill(pid, signum)
            else:
                signal.pidfd_send_signal(fd, signum)
    return True


def pids() -> list[int]:
    """All processes of this machine that can be seen from here."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def read(path: str) -> bytes:
    """What a file in /proc says; empty if it is gone or not ours to read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


@contextlib.contextmanager
def pidfd(pid: int) -> Iterator[int | None]:
    """A descriptor that means this process whoever gets its number; None before Linux 5.3, or if it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)
