"""The user's limits of open files, processes and threads: raised where possible, explained where too low.

Used in every process that holds a file per worker, host or client. Changes only the soft limit of this process.
"""

from __future__ import annotations

import errno
import resource

from ddplaunch.errors import LaunchError
from ddplaunch.text import plural

_FILES_PER_WORKER = 6
"""Two pipes, two log files, the file of its Python stacks, a connection to the socket for workers."""

_OWN_FILES = 32
"""The control channel, the forkserver's socket, /proc during a sweep, and files opened for a moment."""

Limits = tuple[int, int]
"""Soft and hard limit, as in ``resource``."""

PROCESS_LIMITS_HINT = "see `ulimit -u` and the container's pids limit"

NO_ROOM_HINT = (
    "Check the limits of processes and files (`ulimit -u -n`, the container's pids limit) and the free memory."
)
"""Hint where a machine cannot start another process or thread."""


def raise_limit_for_workers(host: str, nproc: int) -> Limits:
    """Raise this process's limit of open files as far as ``nproc`` workers on ``host`` need; returns the old limits.

    Raises:
        LaunchError: the hard limit is too low.
    """
    return raise_open_files(_OWN_FILES + _FILES_PER_WORKER * nproc, f"{plural(nproc, 'worker')} on {host}")


def raise_open_files(needed: int | None = None, purpose: str = "") -> Limits:
    """Raise this process's soft limit of open files to ``needed``, or without it to the hard limit.

    Never lowers a limit. Returns the limits as they were.

    Raises:
        LaunchError: ``purpose`` needs more open files than the hard limit allows.
    """
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = hard if needed is None else needed
    if soft in (target, resource.RLIM_INFINITY):
        return before
    if hard != resource.RLIM_INFINITY and target > hard:
        raise LaunchError(
            f"the limit of {hard} open files is too low for {purpose}: {target} are needed",
            f"Raise the limit: `ulimit -n {target}`, nofile in limits.conf, LimitNOFILE, or the container's limit.",
        )
    if target == resource.RLIM_INFINITY or target > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return before


def shortage(error: BaseException, host: str) -> LaunchError | None:
    """The error for a lack of processes, threads, files or memory on ``host``; None for any other ``error``."""
    # CPython gives no errno where a thread could not be started.
    is_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
    shortages = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
    if not is_thread and not isinstance(error, MemoryError) and getattr(error, "errno", None) not in shortages:
        return None
    return LaunchError(f"{host} lacks processes, threads, open files or memory for this run: {error}", NO_ROOM_HINT)
