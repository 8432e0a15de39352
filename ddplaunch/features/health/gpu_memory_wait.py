"""Waits before another attempt until the GPU memory of the workers that have ended is free.

Runs in the agent, in its main thread. The driver frees the memory of a killed process late; a worker that starts before
would find too little. Memory is compared with that before the first attempt: in a container, the processes that NVML
names may not be the agent's.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import psutil

from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.text import quote, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.agent.events import Wait
    from ddplaunch.features.health.gpu_faults import GpuFaults
    from ddplaunch.protocol.gpus import GpuReading

LIMIT_S = 50.0
TOLERANCE_BYTES = 512 << 20
_ANSWER_S = 2.0
_PAUSE_S = 0.2
_SHOWN_AFTER_S = 3.0


def await_free_memory(
    gpus: GpuFaults, host: str, wait: Wait, is_stopping: Callable[[], bool], send: Callable[[object], None]
) -> None:
    """Return when the memory is free, after ``LIMIT_S``, if NVML does not answer, or if the run must stop."""
    if not gpus.used_at_start:
        return
    started = time.monotonic()
    is_shown = False
    while (occupied := _occupied(gpus, wait, is_stopping)) and not is_stopping():
        waited_s = time.monotonic() - started
        if waited_s >= LIMIT_S:
            send(Notice(f"after {LIMIT_S:.0f} s {_text(host, occupied)}; the workers start all the same", -1))
            return
        if waited_s >= _SHOWN_AFTER_S and not is_shown:
            is_shown = True
            send(Notice(f"{_text(host, occupied)}; the workers start when it is free"))
        wait(is_stopping, time.monotonic() + _PAUSE_S)


def _occupied(gpus: GpuFaults, wait: Wait, is_stopping: Callable[[], bool]) -> list[GpuReading]:
    """The GPUs with more memory in use than before the first attempt."""
    gpus.ask_memory()
    wait(lambda: gpus.memory is not None or is_stopping(), time.monotonic() + _ANSWER_S)
    memory, before = gpus.memory, gpus.used_at_start
    if memory is None:
        return []
    return [gpu for gpu in memory if (gpu.used_bytes or 0) > before.get(gpu.index, 0) + TOLERANCE_BYTES]


def _text(host: str, occupied: list[GpuReading]) -> str:
    gpus = ", ".join(f"{size(gpu.used_bytes or 0)} of GPU {gpu.index}{_holders(gpu)}" for gpu in occupied[:8])
    return f"{gpus} on {host} {'are' if len(occupied) > 1 else 'is'} still in use"


def _holders(gpu: GpuReading) -> str:
    named = [f"pid {pid}{_name(pid)}" for pid in gpu.pids[:4]]
    return f" (held by {', '.join(named)})" if named else " (held by a process that cannot be seen from here)"


def _name(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return f" {quote(psutil.Process(pid).name())}"
    return ""
