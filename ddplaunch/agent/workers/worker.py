"""One worker process: its pid, pipes, files and end, its Python stacks when the job hangs, and injected faults.

Runs in the agent, main thread only; ``Throttle`` has a thread that suspends and resumes a worker. Nothing here starts
or reaps a process (see ``worker_group``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.agent.workers.output import Pump
from ddplaunch.protocol import stack_dump
from ddplaunch.system import processes

if TYPE_CHECKING:
    from ddplaunch.protocol.launcher_agent import InjectFault

_MAX_STACKS_BYTES = 1 << 20
_BLOCKED_STATES = {
    "T": "suspended by a signal",
    "t": "suspended by a debugger",
    "D": "in uninterruptible sleep, as in a file system or a device that does not answer",
}

_THROTTLE_PERIOD_S = 0.1
_MIN_RUN_S = 0.002
"""In less than a tick of the scheduler a process makes no progress."""


class Throttle:
    """Slows a process group down: a thread lets it run for one ``factor``-th of the time.

    The main thread must call ``end`` before it reaps the group's leader, because the kernel may then reuse the pid.
    """

    def __init__(self, pid: int, factor: float) -> None:
        self._pid = pid
        self._run_s = max(_THROTTLE_PERIOD_S / factor, _MIN_RUN_S)
        self._pause_s = self._run_s * (factor - 1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="throttle", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread, with the process group running. No signal is sent after the return."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._run_s):
            processes.signal_group(self._pid, signal.SIGSTOP)
            self._ended.wait(self._pause_s)
            processes.signal_group(self._pid, signal.SIGCONT)


@dataclass
class Worker:
    """One worker.

    Attributes:
        pid: 0 until the process has started.
        returncode: None until the process is reaped.
        stop_signals: the stop signals that were sent to it.
        simulated_exit_code: reported in place of a SIGKILL, for an injected fault.
        throttle: slows the worker down, for an injected fault.
        blocked_state: why the process was blocked when the job hung; empty if it was not.
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
    simulated_exit_code: int | None = None
    throttle: Throttle | None = None
    blocked_state: str = ""

    @property
    def is_running(self) -> bool:
        return self.pid != 0 and self.returncode is None

    @property
    def error_file(self) -> Path | None:
        return self.worker_dir / "error.json" if self.worker_dir else None

    @property
    def stacks_file(self) -> Path | None:
        """File that gets the Python stacks when the job hangs; None means the worker's stderr."""
        return self.worker_dir / stack_dump.FILE if self.worker_dir else None

    # A job that hangs.

    def request_stacks(self) -> None:
        """Make the worker write its Python stacks if it handles the signal; resume it if it is suspended."""
        if not self.is_running:
            return
        self.blocked_state = _BLOCKED_STATES.get(processes.state(self.pid), "")
        if processes.catches(self.pid, stack_dump.SIGNUM):
            processes.signal_process(self.pid, stack_dump.SIGNUM)
            processes.signal_process(self.pid, signal.SIGCONT)

    def whereabouts(self) -> str:
        """The worker's Python line from the stacks, and ``blocked_state``; empty if neither is known."""
        return ", ".join(filter(None, (self._python_line(), self.blocked_state)))

    def _python_line(self) -> str:
        return stack_dump.whereabouts(self.stacks())

    def stacks(self) -> str:
        """The Python stacks that the worker has written for a hang, newest thread first; empty without any."""
        if self.stacks_file is None:
            return ""
        try:
            fd = os.open(self.stacks_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""
        with contextlib.suppress(OSError), os.fdopen(fd, "rb") as file:
            return (file.read(_MAX_STACKS_BYTES) or b"").decode("utf-8", "replace")
        return ""

    # Injected faults.

    def inject(self, order: InjectFault) -> bool:
        """Inject a fault into this worker. False if it had already ended."""
        if not self.is_running or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            return False
        if order.factor is not None:
            self.end_throttle()
            self.throttle = Throttle(self.pid, order.factor)
        elif order.signum == signal.SIGKILL:
            self.simulated_exit_code = order.code
            processes.signal_process(self.pid, signal.SIGKILL)
        else:
            processes.signal_group(self.pid, order.signum)
        return True

    def end_throttle(self) -> None:
        """End the throttle, if there is one; required before the worker is reaped (see ``Throttle``)."""
        if self.throttle:
            self.throttle.end()
            self.throttle = None

    def reported_returncode(self, returncode: int) -> int:
        """``returncode``, or the simulated exit code of a worker that an injected fault has killed.

        To other processes SIGKILL looks like ``os._exit``, and the worker needs no code that a script could notice.
        """
        if self.simulated_exit_code is None or returncode != -signal.SIGKILL:
            return returncode
        return self.simulated_exit_code
