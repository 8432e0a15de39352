"""Signals that reach the launcher, as events of its mailbox."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


PASSED_ON = ("SIGUSR1", "SIGUSR2")
"""Workers get them, and nothing is stopped, unless the user wants otherwise."""


@dataclass(frozen=True)
class Signalled:
    """A signal reached this process."""

    signum: int


@contextlib.contextmanager
def posted(names: Iterable[str], post: Callable[[object], None]) -> Iterator[None]:
    """Post Signalled for the signals ``names`` meanwhile; one that is ignored stays so (nohup, ``&`` in a script).

    Does nothing but in the main thread, where Python allows handlers only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in {signal.SIGCHLD, *map(signal.Signals.__getitem__, names)}}
    for number, handler in before.items():
        if number == signal.SIGCHLD:
            # Where it is ignored, the kernel reaps our children, and how they ended is never known.
            signal.signal(number, signal.SIG_DFL if handler == signal.SIG_IGN else handler)
        elif handler != signal.SIG_IGN:
            signal.signal(number, lambda signum, _frame: post(Signalled(signum)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def suspend() -> None:
    """Do what SIGTSTP does by default, though it is handled; returns when this process is continued.

    Not SIGSTOP: the kernel stops nobody by SIGTSTP whom no shell could continue (an orphaned process group).
    """
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)
