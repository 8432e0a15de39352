"""Asks launchers on this machine over their control sockets, for ``--stacks``.

Runs in an agent without workers. The launcher's process holds its run folder open, so that /proc/PID/fd leads to the
socket, wherever the folder is or has been moved to.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.queries import ExamineRuns, LauncherAnswer, RunsExamined
from ddplaunch.protocol import wire
from ddplaunch.protocol.control import (
    ANSWER_S,
    FROM_LAUNCHER,
    MAX_ANSWER_BYTES,
    SOCKET,
    ExamineRun,
    RequestRefused,
    RunExamined,
)
from ddplaunch.system import process_activity, unix_socket
from ddplaunch.system.files import run_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from ddplaunch.agent.launcher_channel import Outbox

_TIMEOUT_S = ANSWER_S + 5
_MAX_THREADS = 64
_MAX_PROBLEM = 300


def serve(query: ExamineRuns, stream: BinaryIO, outbox: Outbox) -> tuple[int, ...]:
    """Have launchers examine their workers, within ``_TIMEOUT_S``, and send RunsExamined."""
    with ThreadPoolExecutor(min(len(query.launchers), _MAX_THREADS)) as threads:
        outbox.send(RunsExamined(tuple(threads.map(_ask, *zip(*query.launchers, strict=True)))))
    return ()


def _ask(pid: int, run_tag: str) -> LauncherAnswer:
    deadline, problem = time.monotonic() + _TIMEOUT_S, _without_socket(pid)
    if state := process_activity.suspended(pid):
        return LauncherAnswer(pid, problem=f"it is {state}, as by Ctrl-Z: `fg` or `kill -CONT {pid}` continues it")
    for path in _sockets(pid):
        try:
            answer = _request(path, pid, ExamineRun(run_tag), deadline)
        except TimeoutError:
            problem = f"it has not answered for {_TIMEOUT_S:g} s"
        except (OSError, ValueError, wire.ProtocolError) as error:
            problem = f"{SOCKET}: {error}"
        else:
            if isinstance(answer, RunExamined):
                return LauncherAnswer(pid, answer)
            problem = answer.reason
    printable = "".join(character for character in problem if character.isprintable())
    return LauncherAnswer(pid, problem=printable[:_MAX_PROBLEM])


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
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except FileNotFoundError:
        return "it has ended just now"
    except OSError as error:
        return f"its control socket cannot be found: /proc/{pid}/fd: {error.strerror}"
    for fd in descriptors:
        with contextlib.suppress(OSError):
            name = os.path.basename(os.readlink(f"/proc/{pid}/fd/{fd}"))
            if name == f"{run_folder.LOCK} (deleted)":  # As the kernel shows it.
                return "it has no control socket: its run folder was deleted"
            if name == run_folder.LOCK:
                return "it has no control socket: the run ends just now, or its run folder takes none (see its -v)"
    return "it has no control socket, because it keeps no files (--log-dir /dev/null)"


def _descriptors(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/fd")
    return []


def _request(path: str, pid: int, request: ExamineRun, deadline: float) -> RunExamined | RequestRefused:
    """The launcher's answer; ``deadline`` is by ``time.monotonic()``.

    Raises:
        OSError, wire.ProtocolError: there is none, or it is invalid.
    """
    line = unix_socket.ask(path, pid, wire.encode(request), deadline, MAX_ANSWER_BYTES)
    answer: RunExamined | RequestRefused = wire.decode(line, FROM_LAUNCHER)
    return answer
