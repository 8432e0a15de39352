"""Asks the launcher of a run on this machine to stop it, over its control socket.

Runs in the process that the user started.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError
from ddplaunch.protocol import wire
from ddplaunch.protocol.control import FROM_LAUNCHER, MAX_ANSWER_BYTES, SOCKET, RequestRefused, StopRun
from ddplaunch.system import run_json, unix_socket
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.commands.run_folders import RunFolder

_ANSWER_S = 5.0


def stop(run: RunFolder) -> None:
    """Stop the run, as SIGTERM to its launcher does.

    Raises:
        LaunchError: the launcher does not answer, or refuses.
    """
    request = StopRun(run_json.text(run.started, "run_tag"))
    try:
        deadline = time.monotonic() + _ANSWER_S
        path = str(run.path / SOCKET)
        line = unix_socket.ask(path, run.launcher_pid, wire.encode(request), deadline, MAX_ANSWER_BYTES)
        answer = wire.decode(line, FROM_LAUNCHER)
        problem = quote(answer.reason) if isinstance(answer, RequestRefused) else ""
    except (OSError, wire.ProtocolError) as error:
        problem = f"{SOCKET}: {error}"
    if problem:
        raise LaunchError(f"the run is not stopped: {problem}", f"ddplaunch --kill {run.run_id}", NODE_NOT_READY)
