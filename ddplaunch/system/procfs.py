"""Reads /proc and signals processes found there, whoever started them.

Used in every process, also on the hot path: plain reads of single files. Only ``open_files`` raises for a
process that is gone or belongs to another user.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from ddplaunch.errors import NODE_NOT_READY, LaunchError

STATE, PARENT, GROUP, SESSION, FLAGS, STARTED = 0, 1, 2, 3, 6, 19
"""Positions in the result of ``stat``."""

_EXITING = 0x4
"""PF_EXITING of the kernel's include/linux/sched.h: set before a dying process closes its files."""

BLOCKED_STATES = {
    "T": "suspended by a signal",
    "t": "suspended by a debugger",
    "D": "in uninterruptible sleep, as in a file system or a device that does not answer",
}


def check_mounted(host: str) -> None:
    """Raise LaunchError if /proc, which shows all processes, is not mounted on ``host``."""
    if not os.path.exists("/proc/self/stat"):
        message = f"/proc is not mounted on {host}, so its processes cannot be watched"
        raise LaunchError(message, "Mount it: `mount -t proc proc /proc`.", NODE_NOT_READY)


def stat(pid: int | str) -> list[bytes]:
    """Fields of /proc/PID/stat from ``state`` on: field N of proc(5) is at N - 3. Empty if the process is gone.

    ``pid`` may be "self". The second field, the name, may hold spaces and brackets; reading starts behind it.
    """
    return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def read(path: str) -> bytes:
    """Contents of a file in /proc; empty if it is gone or not readable for this user."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


def age_s(pid: int | str) -> float:
    """Seconds since the start of a process, to a hundredth; 0 if it is gone. ``pid`` may be "self"."""
    fields = stat(pid)
    if not fields:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[STARTED]) / os.sysconf("SC_CLK_TCK")


def is_ending(pid: int) -> bool:
    """Whether the process has begun to end: it runs none of its code any more, also if it cannot be reaped yet."""
    fields = stat(pid)
    return bool(fields) and (fields[STATE] in (b"Z", b"X") or bool(int(fields[FLAGS]) & _EXITING))


def suspended(pid: int) -> str:
    """What has suspended the process, as in ``suspended by a signal``; empty if nothing has, or if it is gone."""
    fields = stat(pid)
    return BLOCKED_STATES[fields[STATE].decode()] if fields and fields[STATE] in (b"T", b"t") else ""


def blocked_state(pid: int) -> str:
    """Why the kernel does not run the process; empty if it may run or is gone."""
    fields = stat(pid)
    return BLOCKED_STATES.get(fields[STATE].decode(), "") if fields else ""


def read_and_written(io: bytes) -> tuple[int, int] | None:
    """Bytes read and written, by system calls or for mapped files, of the text of /proc/PID/io."""
    counters = dict(line.split(b": ") for line in io.splitlines())
    if b"rchar" not in counters:
        return None
    pairs = ((b"rchar", b"read_bytes"), (b"wchar", b"write_bytes"))  # Of system calls, and of the storage.
    read, written = (max(int(counters.get(name, 0)) for name in pair) for pair in pairs)
    return read, written


def memory(meminfo: bytes) -> tuple[int, int] | None:
    """Bytes of memory that the machine has, and that programs can still get, of the text of /proc/meminfo.

    None: the kernel does not say it. A program can get what is MemAvailable: no other one then loses any.
    """
    found = dict(line.split(b":") for line in meminfo.splitlines() if line.count(b":") == 1)
    if b"MemTotal" not in found or b"MemAvailable" not in found:
        return None
    return int(found[b"MemTotal"].split()[0]) * 1024, int(found[b"MemAvailable"].split()[0]) * 1024


def open_files(pid: int | str) -> Iterator[str]:
    """What the descriptors of a process lead to: paths, or words like ``socket:[4711]``.

    Raises:
        OSError: it is gone, or belongs to another user.
    """
    folder = f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        with contextlib.suppress(OSError):  # Closed meanwhile.
            yield os.readlink(f"{folder}/{fd}")


def pids() -> list[int]:
    """All processes of this machine that are visible here."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def values(environ: bytes, name: str) -> Iterator[str]:
    """The values of a variable in the contents of /proc/PID/environ, which may have it more than once."""
    prefix = f"{name}=".encode()
    return (os.fsdecode(line.removeprefix(prefix)) for line in environ.split(b"\0") if line.startswith(prefix))


def signal_all(variable: str, signum: int, excluded: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """Signal every process whose environment at its start held ``variable`` (``NAME=value``), except ``excluded``.

    Returns the pids that were signalled. Processes that these start meanwhile may be missed.
    """
    return tuple(pid for pid in pids() if pid not in excluded and _signalled(pid, os.fsencode(variable), signum))


def _signalled(pid: int, variable: bytes, signum: int) -> bool:
    with pidfd(pid) as fd:
        # Empty for a zombie, and where this user may not read it.
        if variable not in read(f"/proc/{pid}/environ").split(b"\0"):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send_signal(pid, fd, signum)
    return True


def send_signal(pid: int, fd: int | None, signum: int) -> None:
    """Signal a process through its pidfd, or by its pid where there is none."""
    if fd is None:
        os.kill(pid, signum)
    else:
        signal.pidfd_send_signal(fd, signum)


@contextlib.contextmanager
def pidfd(pid: int) -> Iterator[int | None]:
    """A descriptor that stays bound to this process when its pid is reused; None before Linux 5.3, or if it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)
