"""Requests to the launcher of a run on this machine, over its control socket: to stop the run, to leave its terminal.

Runs in the process that the user started.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError, UsageError
from ddplaunch.features.runs.run_folders import RunFolder, find
from ddplaunch.protocol import wire
from ddplaunch.protocol.control import (
    FROM_LAUNCHER,
    MAX_ANSWER_BYTES,
    SOCKET,
    LeaveTerminal,
    RequestRefused,
    StopRun,
)
from ddplaunch.system import unix_socket
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.cli.commands import Request

_ANSWER_S = 5.0


def stop(run: RunFolder) -> None:
    """Stop the run, as SIGTERM to its launcher does.

    Raises:
        LaunchError: the launcher does not answer, or refuses.
    """
    if problem := _ask(run, StopRun(run.started.run_tag)):
        raise LaunchError(f"the run is not stopped: {problem}", f"ddplaunch --kill {run.run_id}", NODE_NOT_READY)


def leave(request: Request) -> None:
    """``--leave``: make the run independent of its terminal; a suspended launcher is continued.

    Raises:
        UsageError: there is no such run, or its launcher is not on this machine.
        LaunchError: the launcher does not answer, or refuses.
    """
    run = find("--leave", request.value, request.log_dir)
    if run.other_host and (run.is_running() or run.unknown()):
        there = f"There: ssh {run.other_host} ddplaunch --leave {run.run_id}."
        raise UsageError(f"--leave {request.value}: its launcher is not on this machine but on {run.other_host}", there)
    if not (run.launcher_pid and run.is_running()):
        raise UsageError(f"--leave {request.value}: its launcher has ended")
    os.kill(run.launcher_pid, signal.SIGCONT)
    if problem := _ask(run, LeaveTerminal(run.started.run_tag)):
        raise LaunchError(f"the run still needs its terminal: {problem}", "", NODE_NOT_READY)
    request.report(f"run {run.run_id} goes on without its terminal; to come back: ddplaunch --attach {run.run_id}")


def _ask(run: RunFolder, request: StopRun | LeaveTerminal) -> str:
    """Why the launcher has not done it; empty if it has."""
    deadline = time.monotonic() + _ANSWER_S
    try:
        path = str(run.path / SOCKET)
        line = unix_socket.ask(path, run.launcher_pid, wire.encode(request), deadline, MAX_ANSWER_BYTES)
        answer = wire.decode(line, FROM_LAUNCHER)
    except (OSError, wire.ProtocolError) as error:
        return f"{SOCKET}: {error}"
    return quote(answer.reason, 300) if isinstance(answer, RequestRefused) else ""
