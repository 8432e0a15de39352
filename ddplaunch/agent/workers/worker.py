"""One worker process: its pid, pipes, files and end.

Runs in the agent, main thread only. Nothing here starts or reaps a process (see ``worker_group``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import field
from pathlib import Path

from ddplaunch.agent.workers import exit_details
from ddplaunch.agent.workers.output import Stream
from ddplaunch.agent.workers.pump import Pump
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import script_request
from ddplaunch.system import processes


@dataclass
class Worker:
    """One worker.

    Attributes:
        streams: what comes through pipes, which ``pump`` reads; not what goes to the terminal without us.
        pid: 0 until the process has started.
        returncode: None until the process is reaped.
        stop_signals: the stop signals that were sent to it.
        was_ending: it had begun to end when the first of them was sent.
        in_post_mortem: it has raised an exception, and the user debugs that, or is about to.
        stopped_in_post_mortem: it was when the run was stopped.
        reap: reaps the process ``pid``, and returns its returncode. A feature may replace it.
        request_fd: file in memory for the request of the script; None if it is in the worker's folder.
    """

    rank: int
    local_rank: int
    worker_dir: Path | None
    streams: tuple[Stream, ...] = ()
    pump: Pump | None = None
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
    request_fd: int | None = None

    @property
    def is_running(self) -> bool:
        return self.pid != 0 and self.returncode is None

    @property
    def error_file(self) -> Path | None:
        return self.worker_dir / "error.json" if self.worker_dir else None

    # The request of the script.

    def open_request_file(self) -> str:
        """Path of the file for the request of the script: in the worker's folder; without one, in memory.

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
