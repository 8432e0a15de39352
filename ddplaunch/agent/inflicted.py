"""Harm done to workers on purpose: a rehearsal's ``--inject``, as the launcher orders it."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

from ddplaunch.agent import processes

if TYPE_CHECKING:
    from ddplaunch.agent.worker import Worker
    from ddplaunch.harm import Inflict

_PERIOD_S = 0.1
_LEAST_RUN_S = 0.002
"""Shorter than a scheduler's tick nothing gets anywhere."""


class Drag:
    """Slows a process group down: a thread lets it run only one ``factor``-th of the time.

    The main thread must ``end`` it before it reaps the group's leader, whose number may then be another's.
    """

    def __init__(self, pid: int, factor: float) -> None:
        self._pid = pid
        self._run_s = max(_PERIOD_S / factor, _LEAST_RUN_S)
        self._rest_s = self._run_s * (factor - 1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drag", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let it run, and signal it no more."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._run_s):
            processes.signal_group(self._pid, signal.SIGSTOP)
            self._over.wait(self._rest_s)
            processes.signal_group(self._pid, signal.SIGCONT)


def inflict(order: Inflict, worker: Worker) -> bool:
    """Do it. False if the worker has ended by itself, before."""
    if not worker.runs or os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        return False
    if order.factor is not None:
        end_drag(worker)
        worker.drag = Drag(worker.pid, order.factor)
    elif order.signum == signal.SIGKILL:
        worker.feigned = order.code
        processes.signal_process(worker.pid, signal.SIGKILL)
    else:
        processes.signal_group(worker.pid, order.signum)
    return True


def end_drag(worker: Worker) -> None:
    """To be called before the worker is reaped."""
    if worker.drag:
        worker.drag.end()
        worker.drag = None


def as_feigned(worker: Worker, returncode: int) -> int:
    """How its end is told: one that was to exit with a code was killed.

    Seen from outside that is what ``os._exit`` would be, and it needs nothing in the worker: not Python, and no
    thread that a script could notice.
    """
    return worker.feigned if worker.feigned is not None and returncode == -signal.SIGKILL else returncode
