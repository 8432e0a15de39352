"""Signals of the launcher and the agent become events of their mailboxes.

Runs in the launcher, handlers only in its main thread. ``launcher.shutdown`` decides the effect of a signal. The agent
posts the same event.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field

from ddplaunch.late_dataclass import dataclass
from ddplaunch.system import procfs

PASSED_TO_WORKERS = ("SIGUSR1", "SIGUSR2")
"""Passed to the workers and without effect on the run, unless --signals-to-handle or --requeue-on names them."""

SENT_TO_RUNS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Schedulers and terminals send them, some to the tasks of a step, such as agents, and some to every process."""


owns_terminal = False
"""Whether this process is the command ``ddplaunch``: the terminal of another program is not ours to leave."""

_MOMENT_S = 0.5


@dataclass(frozen=True)
class SignalReceived:
    """This process received a signal at ``received_at`` of ``time.monotonic()``."""

    signum: int
    received_at: float = field(default_factory=time.monotonic, compare=False)


class StopRequests:
    """Counts how often a run, or a node of it, was asked to stop: signals and orders of one moment ask once.

    SLURM sends SIGTERM twice at a time limit, a twentieth of a second apart, and one signal may reach several processes
    of a run. A user who asks again has seen the answer first.

    Attributes:
        count: how often it was asked.
    """

    def __init__(self) -> None:
        self.count = 0
        self._asked_at = -math.inf

    def is_new(self, received_at: float, moment_s: float = _MOMENT_S) -> bool:
        """Count what was received at ``received_at`` of ``time.monotonic()``, unless it belongs to the request before.

        It does for ``moment_s`` after the signal or order that was counted last; those that belong to it do not make
        the moment longer.
        """
        if received_at - self._asked_at < moment_s:
            return False
        self.count, self._asked_at = self.count + 1, received_at
        return True


@contextlib.contextmanager
def ctrl_c_ends_process() -> Iterator[None]:
    """In the ``with`` block, until ``post_signals``, SIGINT has its default effect, if it raises KeyboardInterrupt now.

    Python ignores a KeyboardInterrupt that comes in a callback, as imports have some: the run would go on.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if not is_main or handler is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def post_signals(names: Iterable[str], post: Callable[[object], None], *, ends_process: bool = False) -> Iterator[None]:
    """In the ``with`` block, post SignalReceived for the signals ``names``; ignored ones stay ignored (nohup, ``&``).

    ``ends_process``: this process ends after the block with an exit code that is known; SIGTERM and SIGHUP cannot
    change it any more. A scheduler sends SIGTERM as soon as the first of several launchers has ended. The keys of a
    terminal still end a process that hangs.

    A handler that a C library has set stays in place. Without effect outside the main thread, where Python allows no
    handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if ends_process and signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # By ``ctrl_c_ends_process``.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    numbers = {signal.SIGCHLD, *map(signal.Signals.__getitem__, names)}
    # None: a handler that was not set from Python, and could not be restored.
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) is not None}
    for number, handler in before.items():
        if number == signal.SIGCHLD:
            # If it is ignored, the kernel reaps our children, and their exit codes are lost.
            signal.signal(number, signal.SIG_DFL if handler == signal.SIG_IGN else handler)
        elif handler != signal.SIG_IGN:
            signal.signal(number, lambda signum, _frame: post(SignalReceived(signum)))
    try:
        yield
    finally:
        for number, handler in before.items():
            is_over = ends_process and number in (signal.SIGTERM, signal.SIGHUP)
            signal.signal(number, signal.SIG_IGN if is_over else handler)


def leave_to_agent() -> None:
    """Ignore the signals that may be sent to every process of a run: the agent ends this one, after the workers."""
    for signum in SENT_TO_RUNS:
        signal.signal(signum, signal.SIG_IGN)


def can_be_suspended() -> bool:
    """Whether SIGTSTP stops this process: a shell could continue it (no orphaned process group)."""
    group, session = b"%d" % os.getpgrp(), b"%d" % os.getsid(0)
    fields = procfs.stat("self")
    while fields and fields[procfs.GROUP] == group and fields[procfs.PARENT] != b"0":
        fields = procfs.stat(int(fields[procfs.PARENT]))
    # Of a process that cannot be read nothing is known: the kernel decides.
    return not fields or (fields[procfs.GROUP] != group and fields[procfs.SESSION] == session)


def suspend() -> None:
    """Stop this process as SIGTSTP does by default; returns when it is continued.

    Not by SIGSTOP: see ``can_be_suspended``.
    """
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)
