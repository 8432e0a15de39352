"""How workers and attempts end on this node: error files and requests, kills for lack of memory, last lines; limits.

Runs in the agent, after a worker has ended. Must not raise, block or trust a file that a worker wrote: type, size and
structure are checked.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import first_failure, script_request
from ddplaunch.protocol.agent_entry import MAX_MESSAGE_CHARS, MAX_TRACEBACK_CHARS, PACKAGE_ROOT
from ddplaunch.protocol.results import Certainty, Outcome, StreamName, WorkerError, WorkerExit
from ddplaunch.system import procfs
from ddplaunch.system.files import kept_files

_MAX_TOTAL_CHARS, _LEAST_TOTAL_CHARS = 2 << 20, 8 << 10
"""Limits of the errors and last lines of all workers together: one record holds them, and JSON needs up to 12 bytes per
character."""

_MAX_JOB_CHARS = 8 << 20
"""Of all nodes together: one launcher has the records of all."""

_SHORT_MESSAGE_CHARS = 200

_TAIL_LINES, _SHORT_TAIL_LINES = 200, 20
"""Numbers of last lines: of a worker that failed and was not stopped, and of any other worker."""

_STREAMS: tuple[StreamName, ...] = ("stderr", "stdout")

_OWN_FRAMES = re.compile(
    rf'^  File "{re.escape(PACKAGE_ROOT)}/ddplaunch/(?:worker|features)/.*\n'
    r'|^  File "<string>", line \d+ in <module>\n(?=\n|\Z)'  # The outermost frame of a forked worker.
    r"|^Extension modules: .*\n?",
    re.MULTILINE,
)

_MAX_FILE_BYTES = 4 << 20


# Limits of one record.


def shorten(exits: Sequence[WorkerExit], nnodes: int) -> tuple[WorkerExit, ...]:
    """``exits`` in their order, with as much of errors and last lines as one of ``nnodes`` may send, causes first."""
    remaining_chars = max(_LEAST_TOTAL_CHARS, min(_MAX_TOTAL_CHARS, _MAX_JOB_CHARS // nnodes))
    kept: dict[int, WorkerExit] = {}
    for exit_ in (*first_failure.failures(exits), *exits):
        if exit_.rank not in kept:
            if _chars(exit_) > remaining_chars:
                exit_ = replace(exit_, tail=exit_.tail[-_SHORT_TAIL_LINES:], stacks="")
            if _chars(exit_) > remaining_chars:
                error = exit_.error
                line = first_failure.raising_frame(error.traceback) if error else ""
                short = error and replace(error, message=error.message[:_SHORT_MESSAGE_CHARS], traceback=line)
                exit_ = replace(exit_, error=short, tail=())
            remaining_chars -= min(_chars(exit_), remaining_chars)
            kept[exit_.rank] = exit_
    return tuple(kept[exit_.rank] for exit_ in exits)


def _chars(exit_: WorkerExit) -> int:
    error = len(exit_.error.message) + len(exit_.error.traceback) if exit_.error else 0
    return len(exit_.stacks) + sum(map(len, exit_.tail)) + error


def main_log(folder: Path | None, tails: Mapping[StreamName, bytes]) -> str | None:
    """Path of the log file to open first; None where no log is kept."""
    return f"{folder}/{_main_stream(tails)}.log" if folder and tails else None


def _main_stream(tails: Mapping[StreamName, bytes]) -> StreamName:
    """stderr, or stdout if only stdout has text."""
    with_text: list[StreamName] = [name for name in _STREAMS if tails.get(name, b"").strip()]
    return (*with_text, *(name for name in _STREAMS if name in tails))[0]


def last_lines(tails: Mapping[StreamName, bytes], *, is_needed: bool) -> tuple[str, ...]:
    """A worker's last lines of stderr, or of stdout if stderr is empty; fewer unless they are needed.

    Without what faulthandler prints about ddplaunch's own frames and about extension modules.
    """
    text = tails[_main_stream(tails)].decode("utf-8", "replace") if tails else ""
    lines = _OWN_FRAMES.sub("", text).splitlines()
    return tuple(line for line in lines if line.strip())[-_TAIL_LINES if is_needed else -_SHORT_TAIL_LINES :]


_TRACEBACK = re.compile(r"(?:\[rank\d+\]: )?Traceback \(most recent call last\):")
_RANK_PREFIX = re.compile(r"\[rank\d+\]: ")


def error_in(tail: Sequence[str]) -> WorkerError | None:
    """The exception of the traceback that ends a worker's last lines, where no error file could be written."""
    start = max((number for number, line in enumerate(tail) if _TRACEBACK.fullmatch(line)), default=len(tail))
    lines = [_RANK_PREFIX.sub("", line, count=1) for line in tail[start:]]
    named = next((number for number, line in enumerate(lines) if number and not line.startswith(" ")), 0)
    return WorkerError("\n".join(lines[named:]), "\n".join(lines), 0.0) if named else None


_WATCHDOG = "watchdog thread terminated with exception: "

_THROWN = re.compile(
    rf"(?:^ *what\(\): +|{_WATCHDOG})"
    r"(.*(?:\n(?!Exception raised from |frame #|terminate called|Fatal Python error|\[rank\d+\]:|$).*)*)",
    re.MULTILINE,
)
"""What the C++ runtime and torch's watchdog of NCCL say before they abort a process: an exception that nobody catches,
up to its stack."""


def lost_peer_in(tails: Mapping[StreamName, bytes]) -> WorkerError | None:
    """The exception of C++ that a worker has not survived, if it says that a peer is gone or has not come in time.

    gloo and torch's watchdog of NCCL throw it in a thread of their own, and the process ends by SIGABRT without an
    error file. None for any other abort: its exit says what is known.
    """
    thrown = _THROWN.findall(tails.get("stderr", b"").decode("utf-8", "replace"))
    message = thrown[-1].rpartition(_WATCHDOG)[2][:MAX_MESSAGE_CHARS] if thrown else ""
    return WorkerError(message, "", 0.0) if first_failure.is_peer_loss(message) else None


# The error file.


def read_error_file(path: Path) -> WorkerError | None:
    """The exception recorded in torch's schema (torch.distributed.elastic.multiprocessing.errors); None without a file.

    If the file is none that torch writes, ``message`` is the reason: the worker has failed in any case.

    Raises:
        OSError: the disk does not answer, or the file may not be read.
    """
    try:
        with kept_files.open_regular(path, os.O_NOFOLLOW) as file:
            status = os.fstat(file.fileno())
            if status.st_size > _MAX_FILE_BYTES:
                return WorkerError(f"(its error file has {status.st_size} bytes, which is too many)", "", 0.0)
            # A script may set the time of its file to any.
            return _parse_error(file.read(_MAX_FILE_BYTES), min(max(status.st_mtime, 0.0), time.time()))
    except FileNotFoundError:
        return None
    except kept_files.NotRegular as error:
        return WorkerError(f"(its error file {error.strerror})", "", 0.0)


def _parse_error(text: bytes, time_s: float) -> WorkerError:
    try:
        message = json.loads(text)["message"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return WorkerError("(its error file cannot be parsed)", "", time_s)
    if isinstance(message, str):
        return WorkerError(message[:MAX_MESSAGE_CHARS], "", time_s)
    if not isinstance(message, dict):
        return WorkerError("(its error file cannot be parsed)", "", time_s)
    headline = str(message.get("message", ""))[:MAX_MESSAGE_CHARS]
    return WorkerError(headline, _callstack(message.get("extraInfo")), time_s)


def _callstack(extra: Any) -> str:
    # The end of a traceback names the exception.
    return str(extra.get("py_callstack", ""))[-MAX_TRACEBACK_CHARS:] if isinstance(extra, dict) else ""


# The request of the script.


def read_request_file(path: Path) -> str:
    """The text of a request file, up to its limit; empty without one. If it is no regular file, that is the text.

    Raises:
        OSError: the disk does not answer, or the file may not be read.
    """
    try:
        with kept_files.open_regular(path, os.O_NOFOLLOW) as file:
            return file.read(script_request.MAX_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except kept_files.NotRegular as error:
        return f"({path} {error.strerror})"


# Kills for lack of memory. The kernel's log, which names the victim, is readable for root only.


@dataclass(frozen=True)
class OomCounters:
    """Number of processes killed for lack of memory so far; compare two readings.

    Attributes:
        machine: kills on the whole machine (``oom_kill`` in /proc/vmstat, Linux 4.13), also for limits of cgroups and
            in other users' containers.
        cgroup: kills in the agent's cgroup, with cgroup v2 also in the cgroups below it.
    """

    machine: int = 0
    cgroup: int = 0

    @classmethod
    def read(cls, root: str = "/") -> OomCounters:
        """The counters now; a counter that is missing or unreadable is 0.

        Read them after a worker's exit was seen: the kernel counts a kill before it sends the signal
        (``__oom_kill_process`` in mm/oom_kill.c).
        """
        base = Path(root)
        return cls(machine=_oom_kill(_text(base / "proc/vmstat")), cgroup=_cgroup_kills(base))


def killed_for_memory(before: OomCounters, after: OomCounters) -> Certainty:
    """Whether the kernel killed a process of this run for lack of memory between the two readings.

    A kill in the agent's cgroup is one of this run; a kill elsewhere on the machine may be another user's.
    """
    if after.cgroup > before.cgroup:
        return "yes"
    return "perhaps" if after.machine > before.machine else "no"


def _cgroup_kills(base: Path) -> int:
    own = _own_cgroups(_text(base / "proc/self/cgroup"))
    v1 = _cgroup_file(base / "sys/fs/cgroup/memory", own.get("memory"), "memory.oom_control")
    v2 = _cgroup_file(base / "sys/fs/cgroup", own.get(""), "memory.events")
    return _oom_kill(v1) + _oom_kill(v2)  # The memory controller is in one of the two hierarchies.


def _own_cgroups(text: str) -> dict[str, str]:
    """Controller -> path, from lines such as ``4:cpu,memory:/job``; v2's line ``0::/job`` is the controller ``""``."""
    lines = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}


def _cgroup_file(mount: Path, path: str | None, name: str) -> str:
    # If a container shares the host's cgroup namespace, the path is the host's, but the container's cgroup is mounted.
    candidates = [] if path is None else [mount / path.lstrip("/") / name, mount / name]
    return next(filter(None, map(_text, candidates)), "")


def _oom_kill(text: str) -> int:
    found = re.search(r"^oom_kill ([0-9]+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def _text(path: Path) -> str:
    return procfs.read(str(path)).decode(errors="replace")


# The end of an attempt on this node.


@dataclass(frozen=True)
class AttemptFailure:
    """Why an attempt failed, if not by a worker's exit.

    Attributes:
        reason: a text for the user, which names the host.
        returncode: returncode of the helper process whose end is the failure; None for another failure.
        hung: the launcher has found that the job hangs.
    """

    reason: str
    returncode: int | None = None
    hung: bool = False


def final_failure(
    failure: AttemptFailure | None, unkillable_pids: Sequence[int], host: str, out_of_memory: Certainty
) -> AttemptFailure | None:
    """What ends the attempt besides its workers: processes that SIGKILL does not end, or ``failure``, if there is one.

    A helper process that the kernel has killed for lack of memory is said to be.
    """
    if unkillable_pids:
        return AttemptFailure(f"pids {', '.join(map(str, unkillable_pids))} on {host} cannot be killed")
    if failure and failure.returncode == -signal.SIGKILL and out_of_memory != "no":
        return replace(failure, reason=f"{failure.reason}, {first_failure.KILLED_FOR_MEMORY[out_of_memory]}")
    return failure


def outcome(failure: AttemptFailure | None, exits: Sequence[WorkerExit], *, was_stopped: bool) -> Outcome:
    """The outcome on this node; ``was_stopped``: the user, the launcher or other nodes have stopped it."""
    if failure or first_failure.first_failure(exits):
        return "failed"
    return "stopped" if was_stopped else "succeeded"
