"""Reads /proc and signals processes found there, whoever started them.

Used in every process, also on the hot path: plain reads of single files, no psutil. Must not raise for a process that
is gone or belongs to another user.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator

STATE, PARENT, GROUP, SESSION, FLAGS, STARTED = 0, 1, 2, 3, 6, 19
"""Positions in the result of ``stat``."""


def check_mounted(host: str) -> None:
    """Raise LaunchError if /proc, which shows all processes, is not mounted on ``host``."""
    if not os.path.exists("/proc/self/stat"):
        message = f"/proc is not mounted on {host}, so its processes cannot be watched"
        raise LaunchError(message, "Mount it: `mount -t proc proc /proc`.", NODE_NOT_READY)


def stat(pid: int | str) -> list[bytes]:
    """Fields of /proc/PID/stat from ``state`` on: field N of proc(5) is at N - 3. Empty if the process is gone.

    ``pid`` may be "self". The second field, the name, may hold spaces and brackets; reading starts behind it.
    """
    return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def read(path: str) -> bytes:
    """Contents of a file in /proc; empty if it is gone or not readable for this user."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def pids() -> list[int]:
    """All processes of this machine that are visible here."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def signal_all(variable: str, signum: int, excluded: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Signal every process whose environment at its start held ``variable`` (``NAME=value``), except ``excluded``.

    Returns the pids that were signalled. Processes that these start meanwhile may be missed.
    """
    return tuple(pid for pid in pids() if pid not in excluded and _signalled(pid, os.fsencode(variable), signum))


def _signalled(pid: int, variable: bytes, signum: int) -> bool:
    with pidfd(pid) as fd:
        # Empty for a zombie, and where this user may not read it.
        if variable not in read(f"/proc/{pid}/environ").split(b"\0"):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send_signal(pid, fd, signum)
    return True


def send_signal(pid: int, fd: int | None, signum: int) -> None:
    """Signal a process through its pidfd, or by its pid where there is none."""
    if fd is None:
        os.kill(pid, signum)
    else:
        signal.pidfd_send_signal(fd, signum)


@contextlib.contextmanager
def pidfd(pid: int) -> Iterator[int | None]:
    """A descriptor that stays bound to this process when its pid is reused; None before Linux 5.3, or if it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)
