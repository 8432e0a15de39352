"""Python stacks of the workers of one attempt: requested by a signal, written by faulthandler, read by the agent.

Runs in the agent, main thread only. faulthandler writes the stacks from a C signal handler, which also works in an
endless loop, in a call that holds the GIL and in a call that blocks for ever, but not in uninterruptible sleep.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.worker_records import STACKS_SIGNAL
from ddplaunch.protocol.first_failure import file_and_line, frames, script_frame
from ddplaunch.protocol.results import STACKS_FILE, WorkerExit
from ddplaunch.system import processes, procfs

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker import Worker

DUMP_S = 1.0
"""Time for the workers to write their stacks."""

_MAX_BYTES = 1 << 20
"""Limit of one dump that is read."""

_MAX_SENT_CHARS = 64 << 10
"""The end of a dump has the main thread."""

_BEGIN = "(most recent call first):"
_DEBUGGER = re.compile(r"/(?P<name>ipdb|pudb|pdb|bdb|pydevd|debugpy|remote_pdb)(?:\.py\"|/|_)")
_DEBUGGER_WAITS = re.compile(r" in (_?cmdloop|interaction|_?do_wait_suspend|wait_for_client)$", re.MULTILINE)


class StackDumps:
    """The dumps of one worker.

    Attributes:
        worker: the worker.
        blocked_state: why the process was blocked when its stacks were requested; empty if it was not.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._fd: int | None = None
        self._offsets: list[int] = []
        """Where each requested dump begins in the file."""
        self._written: list[bytes] = []
        """The dumps, once the file is closed."""
        self.blocked_state = ""

    def open(self) -> str:
        """Create the file in memory that gets the stacks; returns the path by which the worker opens it.

        Empty if the kernel has none. A file in the worker's folder would be empty in nearly every run.
        """
        with contextlib.suppress(OSError):
            self._fd = os.memfd_create(STACKS_FILE, os.MFD_CLOEXEC)
            return f"/proc/{os.getpid()}/fd/{self._fd}"
        return ""

    def request(self, *, resume: bool) -> None:
        """Make the worker write its Python stacks if it handles the signal.

        A worker that is suspended writes them once it is resumed, which ``resume`` does.
        """
        worker = self.worker
        if not worker.is_running:
            return
        self.blocked_state = procfs.blocked_state(worker.pid)
        if processes.catches(worker.pid, STACKS_SIGNAL):
            if self._fd is not None:
                self._offsets.append(os.fstat(self._fd).st_size)
            processes.signal_process(worker.pid, STACKS_SIGNAL)
            if resume:
                processes.signal_process(worker.pid, signal.SIGCONT)

    def close(self) -> None:
        """Copy the stacks, if there are some, to the worker's folder, and free the memory."""
        self._written = self._read()
        text, folder = b"".join(self._written), self.worker.worker_dir
        if text and folder:
            with contextlib.suppress(OSError):
                (folder / STACKS_FILE).write_bytes(text)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The dumps that the worker has written, oldest first, each with the newest thread first."""
        return tuple(data.decode("utf-8", "replace") for data in self._read() if data.strip())

    def _read(self) -> list[bytes]:
        if self._fd is None or not self._offsets:
            return self._written
        with contextlib.suppress(OSError):
            ends = [*self._offsets[1:], os.fstat(self._fd).st_size]
            return [
                os.pread(self._fd, min(end - start, _MAX_BYTES), start)
                for start, end in zip(self._offsets, ends, strict=True)
            ]
        return []

    def added_to(self, exit_: WorkerExit, *, sends_text: bool) -> WorkerExit:
        """The worker's ``exit_`` with what the last dump says; ``sends_text``: the launcher cannot read the file."""
        last = self.texts[-1:]
        line = whereabouts(last[0]) if last else ""
        stacks = last[0][-_MAX_SENT_CHARS:] if last and sends_text else ""
        return replace(exit_, whereabouts=", ".join(filter(None, (line, self.blocked_state))), stacks=stacks)


def request(dumps: Sequence[StackDumps], *, resume: bool = False) -> None:
    """Make all workers write their Python stacks, as far as they can; ``resume`` those that are suspended."""
    for each in dumps:
        each.request(resume=resume)


def whereabouts(text: str) -> str:
    """The main thread's innermost frame in the user's script, and the innermost frame of all, from faulthandler's text.

    ``train.py:41 in step (all_reduce, distributed_c10d.py:3190)``; empty if there is no stack. faulthandler writes the
    newest thread first, so the main thread's frames are the last ones; of those the innermost comes first.
    """
    found = frames(text.rpartition(_BEGIN)[2])
    if not found:
        return ""
    script = script_frame(found)
    inside = "" if script is found[0] else f" ({found[0]['name']}, {file_and_line(found[0])})"
    return f"{file_and_line(script)} in {script['name']}{inside}"


def debugger(dump: str) -> str:
    """Name of the debugger in which the main thread is, or in which another thread waits for a command; empty if none.

    Debuggers have threads of their own, which are there also while the script runs.
    """
    *others, main = dump.split(_BEGIN)
    waiting = (thread for thread in others if _DEBUGGER_WAITS.search(thread))
    found = (_DEBUGGER.search(thread) for thread in (main, *waiting))
    return next((match["name"] for match in found if match), "")
