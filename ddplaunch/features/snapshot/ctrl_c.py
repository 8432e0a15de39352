"""Ctrl-C while a snapshot is made: what was begun is removed. Runs in the process of the command."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """In the ``with`` block, SIGINT raises KeyboardInterrupt also within ``ctrl_c_ends_process``: the block cleans up.

    Without effect outside the main thread, and where SIGINT is ignored or handled.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
