"""The first failure of an attempt: separates workers that failed first from those that failed for lack of a peer.

Used by agents and coordinator for restarts, and by the launcher for the failure page and the exit code. Pure.
"""

from __future__ import annotations

import functools
import os
import re
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.protocol.results import WorkerExit

_PEER_LOST = re.compile(
    r"Connection (reset|closed|refused) by peer|connectFullMesh|Connection refused|Broken pipe|Socket closed"
    r"|remote process exited|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|recvBytes|sendBytes"
    r"|Timed out waiting \d+ms for (recv|send)|Watchdog caught collective operation timeout|DistNetworkError"
    r"|DistStoreError|store .* is down",
    re.IGNORECASE,
)
"""Errors of gloo, NCCL and TCPStore in a rank whose *peer* died. The dying rank's sockets close before its exit can be
seen, so such an error may be dated before the failure that caused it."""


_FRAME = r'  File "(?P<path>.*)", line (?P<line>\d+),? in (?P<name>.*)'
_PACKAGE = re.escape(os.path.dirname(os.path.dirname(__file__)))
_LIBRARY_PATH = rf"/(site|dist)-packages/|/lib(64)?/python3[^/]*/|^{_PACKAGE}/(worker|features|cli)/|^<"
"""Texts: most processes that load this module need neither."""

_MAX_KNOWN = 256
"""Texts of which the answer is kept: thousands of ranks often fail with a few."""

KILLED_HINT = "SIGKILL came from outside: a user's kill, the kernel's out-of-memory killer or a job scheduler."
KILLED_IN_DRY_RUN = "SIGKILL came from an injected fault, a user's kill or the kernel's out-of-memory killer."

KILLED_FOR_MEMORY = {
    "yes": "killed by the kernel for memory (out of memory)",
    "perhaps": "perhaps by the kernel for memory: it killed a process on this machine at that time",
}
"""The description of a SIGKILL, by ``WorkerExit.out_of_memory``."""


def failures(exits: Iterable[WorkerExit]) -> list[WorkerExit]:
    """Workers that failed and were not stopped, likely causes first, then by time."""
    return sorted((e for e in exits if _failed(e)), key=lambda e: (cause_order(e), e.time_s, e.rank))


def first_failure(exits: Iterable[WorkerExit]) -> WorkerExit | None:
    """The likely cause of a failed attempt; None if no worker failed."""
    return next(iter(failures(exits)), None)


def _failed(exit_: WorkerExit) -> bool:
    return not exit_.stopped and exit_.returncode != 0


def cause_order(exit_: WorkerExit) -> int:
    """Sorts likely causes of the other failures first: 0 as hardware or script say, 1 by itself, 2 for a lost peer."""
    return 0 if _is_certain(exit_) else 2 if is_consequence(exit_) else 1


def _is_certain(exit_: WorkerExit) -> bool:
    return bool(exit_.hardware or exit_.give_up or exit_.avoid_node)


def is_consequence(exit_: WorkerExit) -> bool:
    """Whether the worker's error is the loss of a peer, so that another worker failed first."""
    if _is_certain(exit_):
        return False
    return exit_.error is not None and is_peer_loss(exit_.error.message)


@functools.lru_cache(_MAX_KNOWN)
def is_peer_loss(message: str) -> bool:
    """Whether an exception with this message says that a peer is gone, or has not come in time."""
    return bool(_PEER_LOST.search(message))


def exit_code(exit_: WorkerExit) -> int:
    """The worker's exit code as a shell reports it: 128 + n for signal n.

    1 if only our stop ended it, because its exception would have ended it with 1.
    """
    if exit_.ended_by_stop:
        return 1
    return 128 - exit_.returncode if exit_.returncode < 0 else exit_.returncode


def ended(returncode: int) -> str:
    """``ended with exit code 7`` or ``was killed by SIGKILL``, for ``returncode`` of ``subprocess``."""
    return f"{'was killed by' if returncode < 0 else 'ended with'} {describe(returncode)}"


def describe(returncode: int) -> str:
    """``exit code 7`` or ``SIGKILL``, for ``returncode`` of ``subprocess``."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


# What the exception and the last lines of a worker say.

_TRACEBACK = "Traceback (most recent call last):\n"
_WRAPPED = (
    r"(?:Caught \w+ in (?P<where>.{1,200})\.|-- (?P<process>Process \d+) terminated with the following error:)\n"
    rf"(?:Original )?{re.escape(_TRACEBACK)}"
)
"""How torch's DataLoader and mp.spawn raise an exception of another process: its traceback is in the message."""

_RAISED_BY_CPP = r"^  what\(\): +"
_ERROR_LINE = rf"[\w.]+(Error|Exception|Interrupt|Exit)\b|.{{0,80}}\b[Ee]rror: |{_RAISED_BY_CPP}"
_FATAL_SIGNAL = r"Fatal Python error: (Aborted|Segmentation fault|Bus error|Illegal instruction|Floating)"
_RANK_PREFIX = r"^\[rank\d+\]: "
_LAST_LINES = 20
_MAX_COLUMNS = 2_000


def headline(message: str) -> str:
    """An exception in one line; of one that another process has raised, what was raised there, and where that was."""
    text = message.strip()
    if wrapped := re.search(_WRAPPED, text):
        lines = text.rpartition(_TRACEBACK)[2].splitlines()
        inner = next((line for line in lines if line[:1].strip()), "")
        return f"{inner}, in {wrapped['where'] or wrapped['process'].lower()}" if inner else text.splitlines()[0]
    return text.splitlines()[0] if text else ""


def last_error(exit_: WorkerExit) -> str:
    """The last of a worker's last lines that looks like an error; empty if none does."""
    lines = [re.sub(_RANK_PREFIX, "", line[:_MAX_COLUMNS]) for line in exit_.tail[-_LAST_LINES:]]
    errors = [line for line in lines if re.match(_ERROR_LINE, line) and not re.match(_FATAL_SIGNAL, line)]
    return re.sub(_RAISED_BY_CPP, "", errors[-1]) if errors else ""


def crashed_at(exit_: WorkerExit) -> str:
    """The innermost line in the user's script where a signal has ended a worker, as faulthandler has printed it."""
    thread = "\n".join(exit_.tail).rpartition("\nCurrent thread 0x")[2].partition("\nThread 0x")[0]
    found = frames(thread)
    return file_and_line(script_frame(found)) if found else ""


# The line of the script.


@functools.lru_cache(_MAX_KNOWN)
def raised_at(traceback: str) -> str:
    """The innermost line in the user's script of an exception's traceback, like ``train.py:41``; empty without one."""
    found = frames(traceback.rpartition(_TRACEBACK)[2])
    return file_and_line(script_frame(found[::-1])) if found else ""


def raising_frame(traceback: str) -> str:
    """Of an exception's traceback only the line of ``raised_at``, so that this finds it still; empty without one."""
    found = frames(traceback.rpartition(_TRACEBACK)[2])
    return script_frame(found[::-1])[0] if found else ""


def frames(stack: str) -> list[re.Match[str]]:
    """The frames in the text of a stack, in its order, each with ``path``, ``line`` and ``name``."""
    return [match for line in stack.splitlines() if (match := re.fullmatch(_FRAME, line))]


def script_frame(innermost_first: list[re.Match[str]]) -> re.Match[str]:
    """The first of these frames that is not in a library; otherwise the outermost."""
    return next(
        (frame for frame in innermost_first if not re.search(_LIBRARY_PATH, frame["path"])), innermost_first[-1]
    )


def file_and_line(frame: re.Match[str]) -> str:
    """Like ``train.py:41``."""
    return f"{os.path.basename(frame['path'])}:{frame['line']}"
