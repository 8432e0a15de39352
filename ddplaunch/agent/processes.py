"""Signalling, reaping and sweeping processes of this node. Only the agent's own children and descendants are touched.

The agent is a subreaper: whatever its workers leave behind becomes its child and is found in its tree.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch import marked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SWEEP_S = 5.0
"""How long a process may take to vanish after SIGKILL before it counts as unkillable (uninterruptible sleep)."""


def watch_exit(pid: int, name: str, exited: Callable[[], None]) -> None:
    """Call ``exited`` from a daemon thread once the child ``pid`` is dead; it stays a zombie until ``reap``.

    Not reaped here: while the zombie holds the pid, no signal of ours can hit a process that got the same number.
    """

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        exited()

    threading.Thread(target=wait, name=f"exit[{name}]", daemon=True).start()


def reap(pid: int) -> int:
    """The returncode (minus the signal's number) of a child that ``watch_exit`` reported."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def signal_group(pid: int, signum: int) -> None:
    """Send to the process group that ``pid``, not reaped yet, leads, or to it alone where it does not lead one yet.

    What is gone or not ours is passed over.
    """
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        signal_process(pid, signum)
    except PermissionError:
        pass


def signal_process(pid: int, signum: int) -> None:
    """Send to ``pid`` alone, a child not reaped yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def state(pid: int) -> str:
    """The letter of proc(5) for what process ``pid`` does; empty if it is gone."""
    return _after_name(pid)[:1].decode()


def catches(pid: int, signum: int) -> bool:
    """Whether process ``pid`` has a handler for ``signum`` (proc(5), SigCgt: signal 1 is the lowest bit)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def sweep(spare: frozenset[int]) -> tuple[int, ...]:
    """SIGKILL and reap every child of this process but ``spare``, and so, since orphans become its children, all below.

    Main thread only. Repeats until none is left.

    Returns:
        Pids still there after ``SWEEP_S``; empty in all but pathological cases.
    """
    deadline = time.monotonic() + SWEEP_S
    left: tuple[int, ...] = ()
    while True:
        found = tuple(pid for pid in _children() if pid not in spare and not _is_reaped(pid))
        if not found and (spare or _is_childless()):
            return ()
        left = found or left
        if time.monotonic() > deadline:
            return left
        _wait_any(found, 0.05)


def _children() -> Iterator[int]:
    """Direct children of this process, dead ones too. The newest first: one that forks and exits is met in time."""
    own = str(os.getpid()).encode()
    for pid in reversed(marked.pids()):
        if _after_name(pid).split()[1:2] == [own]:
            yield pid


def _after_name(pid: int) -> bytes:
    """Of ``pid (name) state ppid ...``, where a name may hold anything."""
    return marked.read(f"/proc/{pid}/stat").rpartition(b")")[2].lstrip()


def _is_reaped(pid: int) -> bool:
    """Kill a child, whose pid cannot be another's before it is reaped, and reap it if it is dead already."""
    signal_process(pid, signal.SIGKILL)
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _is_childless() -> bool:
    """The kernel's word: a child may have escaped from the list by forking and exiting while it was read."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _wait_any(pids: tuple[int, ...], timeout_s: float) -> None:
    """Wait until the first of ``pids`` is gone, at most ``timeout_s``."""
    if pids:
        with marked.pidfd(pids[0]) as pidfd:
            if pidfd is None:
                time.sleep(timeout_s)
            else:
                select.select([pidfd], [], [], timeout_s)


def sweep_run(mark: str, spare: frozenset[int]) -> tuple[int, ...]:
    """SIGKILL every process of this machine whose environment holds ``mark`` (``NAME=value``), but ``spare``.

    For a node whose agent is lost. Returns the pids still there after ``SWEEP_S``.
    """
    deadline = time.monotonic() + SWEEP_S
    while True:
        found = marked.signal_all(mark, signal.SIGKILL, spare)
        if not found or time.monotonic() > deadline:
            return found
        _wait_any(found, 0.05)
