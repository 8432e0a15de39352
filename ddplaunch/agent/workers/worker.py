"""One worker process: its pid, pipes, files and end, and its Python stacks.

Runs in the agent, main thread only. Nothing here starts or reaps a process (see ``worker_group``).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import field
from pathlib import Path

from ddplaunch.agent.workers import exit_details
from ddplaunch.agent.workers.output import Pump
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import script_request, stack_dump
from ddplaunch.system import processes, procfs

_MAX_STACKS_BYTES = 1 << 20


@dataclass
class Worker:
    """One worker.

    Attributes:
        pid: 0 until the process has started.
        returncode: None until the process is reaped.
        stop_signals: the stop signals that were sent to it.
        was_ending: it had begun to end when the first of them was sent.
        in_post_mortem: it has raised an exception, and the user debugs that, or is about to.
        stopped_in_post_mortem: it was when the run was stopped.
        reap: reaps the process ``pid``, and returns its returncode. A feature may replace it.
        blocked_state: why the process was blocked when its stacks were requested; empty if it was not.
        stacks_fd: file of the Python stacks while the worker runs.
        stacks_offsets: where each requested dump begins in that file.
        written_stacks: the dumps, once that file is closed.
        request_fd: file in memory for the request of the script; None if it is in the log folder.
    """

    rank: int
    local_rank: int
    worker_dir: Path | None
    pumps: list[Pump] = field(default_factory=list)
    pid: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    ended_time_s: float = 0.0
    returncode: int | None = None
    stop_signals: set[int] = field(default_factory=set)
    was_ending: bool = False
    in_post_mortem: bool = False
    stopped_in_post_mortem: bool = False
    reap: Callable[[int], int] = processes.reap
    blocked_state: str = ""
    stacks_fd: int | None = None
    stacks_offsets: list[int] = field(default_factory=list)
    written_stacks: list[bytes] = field(default_factory=list)
    request_fd: int | None = None

    @property
    def is_running(self) -> bool:
        return self.pid != 0 and self.returncode is None

    @property
    def error_file(self) -> Path | None:
        return self.worker_dir / "error.json" if self.worker_dir else None

    # The request of the script.

    def open_request_file(self) -> str:
        """Path of the file for the request of the script: in the log folder; without one, in memory.

        Empty if the kernel has no files in memory.
        """
        if self.worker_dir:
            return str(self.worker_dir / script_request.FILE)
        with contextlib.suppress(OSError):
            self.request_fd = os.memfd_create(script_request.FILE, os.MFD_CLOEXEC)
            return f"/proc/{os.getpid()}/fd/{self.request_fd}"
        return ""

    def take_request(self) -> str:
        """What the script has written to that file; call it once, after the worker has ended.

        Raises:
            OSError: it cannot be read.
        """
        if self.worker_dir:
            return exit_details.read_request_file(self.worker_dir / script_request.FILE)
        if self.request_fd is None:
            return ""
        with open(self.request_fd, "rb") as file:
            self.request_fd = None
            file.seek(0)
            return file.read(script_request.MAX_BYTES).decode("utf-8", "replace")

    # Python stacks.

    def open_stacks_file(self) -> str:
        """Create the file in memory that gets the Python stacks; returns the path by which the worker opens it.

        Empty if the kernel has none. A file in the log folder would be empty in nearly every run.
        """
        with contextlib.suppress(OSError):
            self.stacks_fd = os.memfd_create(stack_dump.FILE, os.MFD_CLOEXEC)
            return f"/proc/{os.getpid()}/fd/{self.stacks_fd}"
        return ""

    def close_stacks_file(self) -> None:
        """Copy the stacks, if there are some, to the worker's log folder, and free the memory."""
        self.written_stacks = self._stacks_bytes()
        text = b"".join(self.written_stacks)
        if text and self.worker_dir:
            with contextlib.suppress(OSError):
                (self.worker_dir / stack_dump.FILE).write_bytes(text)
        if self.stacks_fd is not None:
            os.close(self.stacks_fd)
            self.stacks_fd = None

    def request_stacks(self, *, resume: bool) -> None:
        """Make the worker write its Python stacks if it handles the signal.

        A worker that is suspended writes them once it is resumed, which ``resume`` does.
        """
        if not self.is_running:
            return
        self.blocked_state = procfs.blocked_state(self.pid)
        if processes.catches(self.pid, stack_dump.SIGNUM):
            if self.stacks_fd is not None:
                self.stacks_offsets.append(os.fstat(self.stacks_fd).st_size)
            processes.signal_process(self.pid, stack_dump.SIGNUM)
            if resume:
                processes.signal_process(self.pid, signal.SIGCONT)

    def whereabouts(self) -> str:
        """The worker's Python line from the stacks, and ``blocked_state``; empty if neither is known."""
        line = stack_dump.whereabouts(self.stacks[-1]) if self.stacks else ""
        return ", ".join(filter(None, (line, self.blocked_state)))

    @property
    def stacks(self) -> tuple[str, ...]:
        """The dumps of Python stacks that the worker has written, oldest first, each with the newest thread first."""
        return tuple(data.decode("utf-8", "replace") for data in self._stacks_bytes() if data.strip())

    def _stacks_bytes(self) -> list[bytes]:
        if self.stacks_fd is None or not self.stacks_offsets:
            return self.written_stacks
        with contextlib.suppress(OSError):
            ends = [*self.stacks_offsets[1:], os.fstat(self.stacks_fd).st_size]
            return [
                os.pread(self.stacks_fd, min(end - start, _MAX_STACKS_BYTES), start)
                for start, end in zip(self.stacks_offsets, ends, strict=True)
            ]
        return []
