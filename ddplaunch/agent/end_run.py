"""Ends what a run has on this machine, from above: its launcher first, so that it can end as a stopped run does."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import TYPE_CHECKING, BinaryIO

from ddplaunch import marked as proc
from ddplaunch import protocol, run_marks
from ddplaunch.agent import cgroup, processes, remains
from ddplaunch.remains import EndRun

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddplaunch.agent.outbox import Outbox
    from ddplaunch.agent.remains import Process

OVERTIME_S = 15.0
"""How long launcher and agents may take beyond the grace, of which workers and their logs have a part."""

_LOOK_S, _AGAIN_S = 0.2, 0.5


def serve(stream: BinaryIO, outbox: Outbox) -> tuple[int, ...]:
    """Tell what is here, and end a run if that is wanted then. Returns the pids that could not be ended."""
    outbox.send(remains.tell())
    received = protocol.read_record(stream, (EndRun,))
    return _end(received[0], stream) if received else ()


def _end(order: EndRun, stream: BinaryIO) -> tuple[int, ...]:
    """Also returns, with the pids that are there then, when nobody waits for it any more: ``stream`` has ended."""
    spare = _own_line()
    grace_end = time.monotonic() + order.grace_s
    told: dict[Process, float] = {}
    while found := _of_run(order.run_id, spare):
        now = time.monotonic()
        above = _above(found)
        if now >= grace_end + (OVERTIME_S if above[0].kind in ("launcher", "agent") else 0):
            return _kill(order.run_id, spare)
        for process in above:
            # A launcher takes the second for less patience, and the third for none.
            if process not in told or now >= max(grace_end, told[process] + _AGAIN_S):
                told[process] = now
                _send(process, signal.SIGTERM)
                _send(process, signal.SIGCONT)
        if _wait(found[0], (stream,)):
            return _pids(found)
    return ()


def _of_run(run_id: str, spare: frozenset[int]) -> tuple[Process, ...]:
    found, _ = remains.find()
    return tuple(process for process in found if process.pid not in spare and run_id in run_marks.names(process.mark))


def _above(found: tuple[Process, ...]) -> tuple[Process, ...]:
    """Those that end the others."""
    for kind in ("launcher", "agent"):
        above = tuple(process for process in found if process.kind == kind)
        if above:
            return above
    return found


def _kill(run_id: str, spare: frozenset[int]) -> tuple[int, ...]:
    deadline = time.monotonic() + processes.SWEEP_S
    while found := _of_run(run_id, spare):
        for mark in {process.mark for process in found}:
            # One that holds the asking process is left, and what is in it ended one by one.
            cgroup.kill_run(mark, time.monotonic() + _LOOK_S, spare=spare)
        for process in found:
            _send(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        _wait(found[0], ())
    return _pids(found)


def _send(process: Process, signum: int) -> None:
    """Once it is certain that the number still means this process."""
    with proc.pidfd(process.pid) as fd, contextlib.suppress(ProcessLookupError, PermissionError):
        fields = proc.read(f"/proc/{process.pid}/stat").rpartition(b")")[2].split()
        if fields[19:20] != [str(process.started).encode()]:
            return
        if fd is None:
            os.kill(process.pid, signum)
        else:
            signal.pidfd_send_signal(fd, signum)


def _wait(process: Process, asking: tuple[BinaryIO, ...]) -> bool:
    """Until the process is gone, or for a moment. Returns whether ``asking`` has ended meanwhile."""
    with proc.pidfd(process.pid) as fd:
        fds = [stream.fileno() for stream in asking]
        ready, _, _ = select.select([*fds, *([] if fd is None else [fd])], [], [], _LOOK_S)
    return any(fd in ready for fd in fds)


def _pids(found: Iterable[Process]) -> tuple[int, ...]:
    return tuple(sorted({process.pid for process in found}))


def _own_line() -> frozenset[int]:
    """This process and all above it."""
    pids = [os.getpid()]
    while pids[-1] > 1:
        fields = proc.read(f"/proc/{pids[-1]}/stat").rpartition(b")")[2].split()
        if len(fields) < 2:
            break
        pids.append(int(fields[1]))
    return frozenset(pids)
