"""One worker as its agent knows it."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

from ddplaunch import stacks
from ddplaunch.agent import inflicted, processes
from ddplaunch.agent.output import Pump

_MAX_STACKS_BYTES = 1 << 20
_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "in uninterruptible sleep, as in a file system or a device that does not answer",
}


@dataclass
class Worker:
    """One worker.

    Attributes:
        pid: 0 until it is started.
        returncode: None until it is reaped.
        told: the stop signals it got.
        feigned: the exit code that a rehearsal wants its end to be told as; ``drag`` slows it down for one.
        stands: what kept it from running when its stacks were asked for.
    """

    rank: int
    local_rank: int
    log_dir: Path | None
    pumps: list[Pump] = field(default_factory=list)
    pid: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    ended_time_s: float = 0.0
    returncode: int | None = None
    told: set[int] = field(default_factory=set)
    feigned: int | None = None
    drag: inflicted.Drag | None = None
    stands: str = ""

    @property
    def runs(self) -> bool:
        return self.pid != 0 and self.returncode is None

    @property
    def error_file(self) -> Path | None:
        return self.log_dir / "error.json" if self.log_dir else None

    @property
    def stacks_file(self) -> Path | None:
        """Where it writes its stacks when the job hangs; to its stderr without one."""
        return self.log_dir / stacks.FILE if self.log_dir else None

    def whereabouts(self) -> str:
        """Where it was when it was asked to write its stacks, as far as that is known."""
        return ", ".join(filter(None, (self._place(), self.stands)))

    def _place(self) -> str:
        if self.stacks_file is None:
            return ""
        try:
            fd = os.open(self.stacks_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return ""
        with contextlib.suppress(OSError), os.fdopen(fd, "rb") as file:
            return stacks.whereabouts((file.read(_MAX_STACKS_BYTES) or b"").decode("utf-8", "replace"))
        return ""

    def write_stacks(self) -> None:
        """Have it do so, if it can; a stopped one is continued."""
        if not self.runs:
            return
        self.stands = _STATES.get(processes.state(self.pid), "")
        if processes.catches(self.pid, stacks.SIGNUM):
            processes.signal_process(self.pid, stacks.SIGNUM)
            processes.signal_process(self.pid, signal.SIGCONT)
