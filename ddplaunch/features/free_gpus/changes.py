"""Tells when a file in a folder changes, by the kernel's inotify(7). Runs in the agent, in a thread."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

from ddplaunch.threads import in_thread

_MODIFIED, _CLOSED_AFTER_WRITE, _DELETED = 0x2, 0x8, 0x200
"""The masks of inotify(7). The kernel closes the files of a process that ends, however it ends."""

_READ_BYTES = 64 << 10


@contextlib.contextmanager
def of_folder(path: str, on_change: Callable[[], None]) -> Iterator[None]:
    """In the ``with`` block, call ``on_change`` in a thread: once for all changes of a moment.

    It is never called where the kernel does not tell changes, or this user watches too many folders already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    opened = libc.inotify_init1(os.O_CLOEXEC)
    mask = _MODIFIED | _CLOSED_AFTER_WRITE | _DELETED
    watch = libc.inotify_add_watch(opened, os.fsencode(path), mask) if opened >= 0 else -1
    has_ended: list[bool] = []

    def read() -> None:
        while os.read(opened, _READ_BYTES) and not has_ended:
            on_change()
        os.close(opened)

    try:
        if watch >= 0:
            in_thread("gpu register", read)
    except RuntimeError:  # No room for a thread.
        watch = -1
    try:
        yield
    finally:
        has_ended.append(True)
        if watch >= 0:
            libc.inotify_rm_watch(opened, watch)  # The thread then reads a last event.
        elif opened >= 0:
            os.close(opened)
