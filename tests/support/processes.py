"""Processes seen from outside: is one alive, which carry a mark, wait for something with a bound."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_PAUSE_PER_CPU = 10.0


def own_descriptors() -> set[tuple[str, str]]:
    """The open descriptors of this process, with what they are, without those that garbage of earlier tests holds.

    Some may be closed at any time, and their numbers be used again: a thread of an earlier test may be at its end.
    """
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def wait_until(condition: Callable[[], T], timeout_s: float = 10.0, what: str = "", pause_s: float = 0.01) -> T:
    """Poll ``condition``, with pauses, until it is truthy and return its value.

    One that takes much CPU, as a look at all processes does, is asked less often: it would slow down what it waits for.

    Raises:
        TimeoutError: it never was within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        used_before = time.thread_time()
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(what or f"{condition} not met within {timeout_s} s")
        time.sleep(max(pause_s, _PAUSE_PER_CPU * (time.thread_time() - used_before)))


def pass_on_no_ignored_signals() -> None:
    """What this process ignores, every program that it starts ignores too: so it is under nohup, and behind ``&``.

    The signals have no effect on this process as before, but by a handler, and a program does not inherit handlers.
    """
    for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)


def state(pid: int) -> str:
    """The one-letter state of ``pid`` in /proc, or an empty text if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """A zombie counts as gone: where PID 1 does not reap, that is all that can be had."""
    return state(pid) not in ("", "Z", "X")


def pids_with(mark: str) -> list[int]:
    """Live processes, but this one, whose environment at their start held ``mark`` (``NAME=value``)."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environ = Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:
                continue
            if mark.encode() in environ.split(b"\0") and is_alive(int(entry)):
                found.append(int(entry))
    return found


def command_line(pid: int) -> str:
    """The command line of ``pid`` with spaces, or an empty text if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """Direct children of ``pid``, zombies left out."""
    return sorted(child for child in _children_alive_or_not(pid) if is_alive(child))


def has_children() -> bool:
    """Whether this process has any child, alive or not."""
    return bool(_children_alive_or_not(os.getpid()))


def _children_alive_or_not(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        texts = [Path(f"/proc/{pid}/task/{thread}/children").read_text() for thread in threads]
    except OSError:  # A kernel without CONFIG_PROC_CHILDREN, or a thread that has just ended.
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and _is_child(int(name), pid)]
    return [int(word) for text in texts for word in text.split()]


def _is_child(pid: int, of: int) -> bool:
    try:
        return parent(pid) == of
    except OSError:
        return False


def parent(pid: int) -> int:
    """The process that ``pid`` is a child of."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def catches(pid: int, signum: int) -> bool:
    """Whether ``pid`` has a handler for ``signum``."""
    return _in_mask(pid, "SigCgt", signum)


def ignores(pid: int, signum: int) -> bool:
    """Whether ``pid`` ignores ``signum``."""
    return _in_mask(pid, "SigIgn", signum)


def _in_mask(pid: int, name: str, signum: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith(f"{name}:")), 0)
    return bool(mask >> (signum - 1) & 1)


def peak_mb(pid: int) -> int:
    """The most memory this process has had at once."""
    return _memory_kb(pid, "VmHWM:") // 1024


def resident_kb(pid: int) -> int:
    """The memory that this process has now."""
    return _memory_kb(pid, "VmRSS:")


def _memory_kb(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith(name)).split()[1])
