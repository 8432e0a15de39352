"""Before a fork, waits until gloo's threads rest: up to Python 3.11 the child could hang for ever.

Runs in a worker of a dry run. After a collective, a thread of gloo takes the GIL to release Python objects, and creates
a thread state for that. A lock guards CPython's list of thread states. A child that is forked while another thread
holds the lock inherits it locked, and waits for it before it runs any Python code (CPython issue 112275; 3.12 and the
last releases of 3.10 and 3.11 reset the lock first). With NCCL these threads of gloo do not exist: a script whose
``DataLoader`` forks would hang in its dry run only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

_THREAD = b"pt_gloo_runloop"
_LIMIT_S = 1.0
_PAUSE_S = 0.0005


def install() -> None:
    """Make every fork of this process wait for ``wait_for_rest``."""
    if sys.version_info < (3, 12):
        os.register_at_fork(before=wait_for_rest)


def wait_for_rest() -> None:
    """Return when no thread of gloo runs, or after 1 s: a collective that is in flight may go on for longer.

    A thread that sleeps waits for work or for the GIL, and this thread keeps the GIL until the child exists.
    """
    deadline = time.monotonic() + _LIMIT_S
    while _runs() and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)  # Gives the GIL to gloo's thread.


def _runs() -> bool:
    return any(map(_is_running, os.listdir("/proc/self/task")))


def _is_running(thread_id: str) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread_id}/stat", "rb") as file:
        name, _, state = file.read().partition(b"(")[2].rpartition(b") ")
        return name == _THREAD and not state.startswith(b"S")
    return False
