"""Signals, reaps and sweeps processes of this machine.

Runs in the agent, which is a subreaper: orphans of its workers become its children. Apart from ``sweep_run``, must
touch only children of this process, whose pids cannot be reused before they are reaped.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ddplaunch.system import procfs
from ddplaunch.threads import in_thread

UNKILLABLE_AFTER_S = 5.0
"""Seconds after SIGKILL after which a process that still exists counts as unkillable (uninterruptible sleep)."""


def watch_exit(pid: int, name: str, exited: Callable[[], None]) -> None:
    """Call ``exited`` from a new daemon thread once the child ``pid`` is dead.

    The child stays a zombie until ``reap``: while it holds the pid, a signal cannot hit another process.
    """

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        exited()

    in_thread(f"exit[{name}]", wait)


def reap(pid: int) -> int:
    """Reap a child that ``watch_exit`` reported; returns its exit code, or minus the number of its signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def signal_group(pid: int, signum: int) -> None:
    """Signal the process group of ``pid``, a child not reaped yet, or ``pid`` alone while it leads no group.

    Ignores processes that are gone or belong to another user.
    """
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        signal_process(pid, signum)
    except PermissionError:
        pass


def signal_process(pid: int, signum: int) -> None:
    """Signal ``pid`` alone, a child not reaped yet. Ignores errors."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


class ForkedChild:
    """A child that this process has not started by ``subprocess``, with the methods of ``Popen`` that are used."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        """SIGKILL it; ignores a child that is gone."""
        signal_process(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Wait for its end and reap it; returns its returncode, -SIGKILL if that is lost.

        Raises:
            subprocess.TimeoutExpired: it has not ended within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    return os.waitstatus_to_exitcode(status)
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
                _wait_any((self.pid,), 0.05)
        return -signal.SIGKILL


def state(pid: int) -> str:
    """The letter of proc(5) for the state of process ``pid``; empty if it is gone."""
    fields = procfs.stat(pid)
    return fields[procfs.STATE].decode() if fields else ""


def catches(pid: int, signum: int) -> bool:
    """Whether process ``pid`` has a handler for ``signum``."""
    return _is_in_mask(pid, "SigCgt:", signum)


def ignores(pid: int, signum: int) -> bool:
    """Whether process ``pid`` ignores ``signum``."""
    return _is_in_mask(pid, "SigIgn:", signum)


def _is_in_mask(pid: int, name: str, signum: int) -> bool:
    """Whether ``signum`` is in a mask of proc(5): signal 1 is the lowest bit."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(name):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def sweep(excluded: frozenset[int]) -> tuple[int, ...]:
    """SIGKILL and reap every child of this process except ``excluded``, until there are none.

    This ends all descendants, because orphans become children. Main thread only.

    Returns:
        Pids that still exist after ``UNKILLABLE_AFTER_S``: processes in uninterruptible sleep.
    """
    deadline = time.monotonic() + UNKILLABLE_AFTER_S
    unkillable: tuple[int, ...] = ()
    while True:
        found = tuple(pid for pid in _children() if pid not in excluded and not _is_reaped(pid))
        if not found and (excluded or _is_childless()):
            return ()
        unkillable = found or unkillable
        if time.monotonic() > deadline:
            return unkillable
        _wait_any(found, 0.05)


def _children() -> Iterator[int]:
    """Direct children of this process, dead ones too; newest first, because a new child may soon fork and exit."""
    own = str(os.getpid()).encode()
    for pid in reversed(procfs.pids()):
        fields = procfs.stat(pid)
        if fields and fields[procfs.PARENT] == own:
            yield pid


def _is_reaped(pid: int) -> bool:
    """Kill a child, and reap it if it is dead already."""
    signal_process(pid, signal.SIGKILL)
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _is_childless() -> bool:
    """Whether the kernel has no child of this process; a child that forks during a scan of /proc can be missed."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _wait_any(pids: tuple[int, ...], timeout_s: float) -> None:
    """Wait until the first of ``pids`` is gone, at most ``timeout_s``."""
    if pids:
        with procfs.pidfd(pids[0]) as pidfd:
            if pidfd is None:
                time.sleep(timeout_s)
            else:
                select.select([pidfd], [], [], timeout_s)


def sweep_run(variable: str, excluded: frozenset[int]) -> tuple[int, ...]:
    """SIGKILL every process of this machine whose environment holds ``variable`` (``NAME=value``), except ``excluded``.

    For a node whose agent is lost. Returns the pids that still exist after ``UNKILLABLE_AFTER_S``.
    """
    deadline = time.monotonic() + UNKILLABLE_AFTER_S
    while True:
        found = procfs.signal_all(variable, signal.SIGKILL, excluded)
        if not found or time.monotonic() > deadline:
            return found
        _wait_any(found, 0.05)
