"""The few Linux calls Python has no name for. Shared by every process; loads ctypes, nothing else."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc().prctl(option, value, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when the *thread* that is its parent ends (prctl(2), PR_SET_PDEATHSIG).

    Exits at once if ``parent_pid`` is not the parent any more: it died before the call, and no signal will come.
    Cleared by fork; kept over exec.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init's (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


_MAP_FIELDS = {
    "start_code": 26,
    "end_code": 27,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
    "brk": 0,
    "start_stack": 28,
    "arg_start": 48,
    "arg_end": 49,
    "env_start": 50,
    "env_end": 51,
    "auxv": 0,
}
"""Of struct prctl_mm_map, with their numbers in /proc/self/stat (proc(5)), 0 where they are not there."""


class _MemoryMap(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in _MAP_FIELDS),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


_shown: list[ctypes.Array[ctypes.c_char]] = []
"""Memory the kernel reads our command line and environment from; never freed."""


def set_command_line(argv: list[str], env: Mapping[str, str] | None = None) -> None:
    """Show ``argv`` in ps, top and /proc/self/cmdline, and ``env`` in /proc/self/environ as if started with them.

    The kernel reads both from the process's own memory, between borders that a process may move (prctl(2),
    PR_SET_MM_MAP). Where it may not, ``argv`` is written over the old one, cut to its room, and ``env`` is not shown.
    """
    with open("/proc/self/stat", "rb") as stat:
        from_third = stat.read().rpartition(b")")[2].split()
    places = {name: int(from_third[number - 3]) for name, number in _MAP_FIELDS.items() if number}
    start, room = places["arg_start"], places["arg_end"] - places["arg_start"]
    line = b"".join(os.fsencode(arg) + b"\0" for arg in argv)
    if start and room > 0 and not _move_borders(places, line, env):
        ctypes.memmove(start, line[: room - 1].ljust(room, b"\0"), room)


def _move_borders(places: dict[str, int], line: bytes, env: Mapping[str, str] | None) -> bool:
    places["arg_start"], places["arg_end"] = _placed(line)
    if env is not None:
        block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
        places["env_start"], places["env_end"] = _placed(block)
    sbrk = _libc().sbrk
    sbrk.restype, sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    map_ = _MemoryMap(**places, brk=sbrk(0) or 0, exe_fd=0xFFFFFFFF)
    size = ctypes.c_ulong(ctypes.sizeof(map_))
    return bool(_libc().prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(map_), size, 0) == 0)


def _placed(text: bytes) -> tuple[int, int]:
    buffer = ctypes.create_string_buffer(text, len(text))
    _shown.append(buffer)
    return ctypes.addressof(buffer), ctypes.addressof(buffer) + len(text)
