"""Room for many workers: each takes open files and threads of the agent, which the user's limits may not allow."""

from __future__ import annotations

import errno
import resource
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError

if TYPE_CHECKING:
    from ddplaunch.model import AgentSpec

_FILES_PER_WORKER = 4
"""Two pipes and two log files."""

_OWN_FILES = 32
"""The control channel, the forkserver's socket, /proc while sweeping, and what is open for a moment."""

Limits = tuple[int, int]
"""Soft and hard, as ``resource`` has them."""

WHERE_TO_LOOK = "see `ulimit -u` and the container's pids limit"


def make_room(spec: AgentSpec, nproc: int) -> Limits:
    """Raise this process's own limit of open files as far as ``nproc`` workers need it; returns what it was.

    Raises:
        LaunchError: the hard limit is too low.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OWN_FILES + _FILES_PER_WORKER * nproc
    if needed > before[1]:
        raise LaunchError(
            f"{nproc} workers on {spec.host} need {needed} open files, and the limit is {before[1]}",
            f"Raise it, `ulimit -n {needed}` or the container's nofile limit, or start fewer workers.",
        )
    if needed > before[0]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, before[1]))
    return before


def shortage(error: BaseException, host: str) -> LaunchError | None:
    """The error to show where the system has refused a process, a thread, a file or memory; None for another error."""
    # CPython has no errno for a thread that could not be started.
    thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    short = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
    if not thread and not isinstance(error, MemoryError) and getattr(error, "errno", None) not in short:
        return None
    return LaunchError(
        f"{host} has too little room for this run: {error}",
        "Look at the limits of processes and files (`ulimit -u -n`, the container's pids limit) and at the memory.",
    )
