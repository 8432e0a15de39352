"""Asks launchers on this machine over their control sockets, for commands like ``--stacks``.

Runs in an agent without workers. The launcher's process holds its run folder open, so that /proc/PID/fd leads to the
socket, wherever the folder is or has been moved to.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from ddplaunch import features
from ddplaunch.features.ps.queries import AskLaunchers, LaunchersAnswered
from ddplaunch.protocol import wire
from ddplaunch.protocol.control import (
    ANSWER_S,
    MAX_ANSWER_BYTES,
    SOCKET,
    Answer,
    Request,
    RequestRefused,
)
from ddplaunch.system import procfs, unix_socket
from ddplaunch.system.files import run_folder

if TYPE_CHECKING:
    from ddplaunch.agent.launcher_channel import Outbox

_TIMEOUT_S = ANSWER_S + 5
_MAX_THREADS = 64
_MAX_PROBLEM = 300


def serve(query: AskLaunchers, stream: BinaryIO, outbox: Outbox) -> tuple[int, ...]:
    """Make the request to all launchers of the query, within ``_TIMEOUT_S``, and send LaunchersAnswered."""
    with ThreadPoolExecutor(min(len(query.launchers), _MAX_THREADS)) as threads:
        answers = threads.map(partial(_ask, query.request), *zip(*query.launchers, strict=True))
        pids = (pid for pid, _ in query.launchers)
        outbox.send(LaunchersAnswered(tuple(zip(pids, answers, strict=True))))
    return ()


def _ask(request: Any, pid: int, run_tag: str) -> Answer | RequestRefused:
    deadline, problem = time.monotonic() + _TIMEOUT_S, _without_socket(pid)
    if state := procfs.suspended(pid):
        return RequestRefused(f"it is {state}, as by Ctrl-Z: `fg` or `kill -CONT {pid}` continues it")
    for path in _sockets(pid):
        try:
            answer = _answer(path, pid, replace(request, run_tag=run_tag), deadline)
        except TimeoutError:
            problem = f"it has not answered for {_TIMEOUT_S:g} s"
        except (OSError, ValueError, wire.ProtocolError) as error:
            problem = f"{SOCKET}: {error}"
        else:
            if isinstance(answer, Answer):
                return answer
            problem = answer.reason
    printable = "".join(character for character in problem if character.isprintable())
    return RequestRefused(printable[:_MAX_PROBLEM])


def _sockets(pid: int) -> Iterator[str]:
    """Paths of control sockets in folders that the process has open; each is short enough for a socket's address."""
    found = set()
    for fd in _descriptors(pid):
        path = f"/proc/{pid}/fd/{fd}/{SOCKET}"
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISSOCK(status.st_mode) and (status.st_dev, status.st_ino) not in found:
                found.add((status.st_dev, status.st_ino))  # The folder is open more than once.
                yield path


def _without_socket(pid: int) -> str:
    """Why a launcher may have no control socket."""
    try:
        names = {os.path.basename(path) for path in procfs.open_files(pid)}
    except FileNotFoundError:
        return "it has ended just now"
    except OSError as error:
        return f"its control socket cannot be found: /proc/{pid}/fd: {error.strerror}"
    if f"{run_folder.LOCK} (deleted)" in names:  # As the kernel shows it.
        return "it has no control socket: its run folder was deleted"
    if run_folder.LOCK in names:
        return "it has no control socket: the run ends just now, or its run folder takes none (see its -v)"
    return "it has no control socket, because it keeps no files (--log-dir /dev/null)"


def _descriptors(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/fd")
    return []


def _answer(path: str, pid: int, request: Request, deadline: float) -> Answer | RequestRefused:
    """The launcher's answer; ``deadline`` is by ``time.monotonic()``.

    Raises:
        OSError, wire.ProtocolError: there is none, or it is invalid.
    """
    line = unix_socket.ask(path, pid, wire.encode(request), deadline, MAX_ANSWER_BYTES)
    answer: Answer | RequestRefused = wire.decode(line, (RequestRefused,), lambda: features.records("FROM_LAUNCHER"))
    return answer
