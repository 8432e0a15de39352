"""Injects the faults of ``--inject`` into the workers of this node.

Runs in the agent, in its main thread; ``Throttle`` has a thread that suspends and resumes a worker.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import Part
from ddplaunch.features.faults.records import FaultInjected, InjectFault
from ddplaunch.system import processes
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker import Worker

_THROTTLE_PERIOD_S = 0.1
_MIN_RUN_S = 0.002
"""In less than a tick of the scheduler a process makes no progress."""


class FaultPart(Part):
    """Faults of one node."""

    def on_event(self, event: object) -> bool:
        """Inject a fault into one worker, and report it if the worker still ran."""
        if not isinstance(event, InjectFault) or self._group is None:
            return False
        group = self._group
        if event.attempt == group.attempt and _inject(group.workers[event.local_rank], event):
            self._node.outbox.send(FaultInjected(event.number))
        return True


def _inject(worker: Worker, order: InjectFault) -> bool:
    """Inject a fault into this worker. False if it had already ended."""
    if not worker.is_running or os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        return False
    if order.factor is not None:
        worker.reap = Throttle(worker, order.factor).reap
    elif order.signum == signal.SIGKILL:
        worker.reap = partial(_simulated, worker.reap, order.code)
        processes.signal_process(worker.pid, signal.SIGKILL)
    else:
        processes.signal_group(worker.pid, order.signum)
    return True


def _simulated(reap: Callable[[int], int], code: int | None, pid: int) -> int:
    """Reap a worker that was killed: reports the exit code of the fault in place of the SIGKILL.

    To other processes SIGKILL looks like ``os._exit``, and the worker needs no code that a script could notice.
    """
    returncode = reap(pid)
    return returncode if code is None or returncode != -signal.SIGKILL else code


class Throttle:
    """Slows a process group down: a thread lets it run for one ``factor``-th of the time, until it is reaped.

    No signal is sent afterwards, because the kernel may then use the pid of the group's leader again.
    """

    def __init__(self, worker: Worker, factor: float) -> None:
        self._pid, self._reap = worker.pid, worker.reap
        self._run_s = max(_THROTTLE_PERIOD_S / factor, _MIN_RUN_S)
        self._pause_s = self._run_s * (factor - 1)
        self._ended = threading.Event()
        self._thread = in_thread("throttle", self._run)

    def reap(self, pid: int) -> int:
        """End the thread, with the process group running, and reap the leader."""
        self._ended.set()
        self._thread.join()
        return self._reap(pid)

    def _run(self) -> None:
        while not self._ended.wait(self._run_s):
            processes.signal_group(self._pid, signal.SIGSTOP)
            self._ended.wait(self._pause_s)
            processes.signal_group(self._pid, signal.SIGCONT)


part = FaultPart
