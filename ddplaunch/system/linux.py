"""Linux calls that Python does not offer, or only as numbers: prctl, ps's command line, pipes, sources of host names.

Used by every process; must stay cheap to import.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import signal
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddplaunch.system import procfs

if TYPE_CHECKING:
    import socket

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


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Make the kernel send ``signum`` when the *thread* that created this process ends (prctl(2), PR_SET_PDEATHSIG).

    Exits at once if ``parent_pid`` is no longer the parent: it ended before the call, so no signal would come. A fork
    clears the setting, exec keeps it.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os._exit(1)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, not of init (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ignore_name_servers() -> None:
    """Resolve names in this process from /etc/hosts alone; no effect without glibc.

    torch looks up the name of the peer of every connection, only for its messages, in the thread that serves a store. A
    name server that does not answer would block that thread for 10 s and more.
    """
    with contextlib.suppress(AttributeError):
        _libc()["__nss_configure_lookup"](b"hosts", b"files")


_PIPE_BYTES = 1 << 20
"""The largest size that an unprivileged process may request (pipe(7), /proc/sys/fs/pipe-max-size)."""


def enlarge_pipe(fd: int) -> None:
    """Let the writer of a pipe be ``_PIPE_BYTES`` ahead of its reader; ``fd`` is either end. No effect on other files.

    Over the user's quota of pipe memory the pipe stays at 64 KiB.
    """
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def output_pipe() -> tuple[int, int]:
    """A large pipe for one stream of a worker: (the agent's end, the worker's end)."""
    reader, writer = os.pipe()
    enlarge_pipe(writer)
    return reader, writer


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
"""Address fields of struct prctl_mm_map, with their field numbers in /proc/self/stat (proc(5)); 0 if not in it."""


class _MemoryMap(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in _MAP_FIELDS),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


_buffers: list[ctypes.Array[ctypes.c_char]] = []
"""Memory from which the kernel reads the command line and environment of this process; never freed."""


def set_command_line(argv: list[str], env: Mapping[str, str] | None = None) -> None:
    """Show ``argv`` in ps, top and /proc/self/cmdline, and ``env`` in /proc/self/environ.

    The kernel reads both from the memory of the process, between addresses that the process may move (prctl(2),
    PR_SET_MM_MAP). If the kernel refuses that, ``argv`` overwrites the old command line, cut to the old length, and
    ``env`` is not shown.
    """
    fields = procfs.stat("self")
    addresses = {name: int(fields[number - 3]) for name, number in _MAP_FIELDS.items() if number}
    start, room = addresses["arg_start"], addresses["arg_end"] - addresses["arg_start"]
    line = b"".join(os.fsencode(arg) + b"\0" for arg in argv)
    if start and room > 0 and not _move_borders(addresses, line, env):
        ctypes.memmove(start, line[: room - 1].ljust(room, b"\0"), room)


def _move_borders(addresses: dict[str, int], line: bytes, env: Mapping[str, str] | None) -> bool:
    addresses["arg_start"], addresses["arg_end"] = _copied(line)
    if env is not None:
        block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
        addresses["env_start"], addresses["env_end"] = _copied(block)
    sbrk = _libc().sbrk
    sbrk.restype, sbrk.argtypes = ctypes.c_void_p, (ctypes.c_ssize_t,)
    map_ = _MemoryMap(**addresses, brk=sbrk(0) or 0, exe_fd=0xFFFFFFFF)
    size = ctypes.c_ulong(ctypes.sizeof(map_))
    return bool(_libc().prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(map_), size, 0) == 0)


def _copied(text: bytes) -> tuple[int, int]:
    buffer = ctypes.create_string_buffer(text, len(text))
    _buffers.append(buffer)
    return ctypes.addressof(buffer), ctypes.addressof(buffer) + len(text)


_UCRED = struct.Struct("3i")


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Pid and user id of the process at the other end of a unix socket, which cannot be forged."""
    from socket import SO_PEERCRED, SOL_SOCKET  # Other numbers on other processors.

    pid, uid, _gid = _UCRED.unpack(connection.getsockopt(SOL_SOCKET, SO_PEERCRED, _UCRED.size))
    return pid, uid
