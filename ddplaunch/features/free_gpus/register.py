"""The runs of this machine that use GPUs or wait for some: a file for each, in a folder that all users share.

A file counts as long as the agent that has written it has locked it (flock(2)), which the kernel ends however the agent
ends, and then as long as this agent or one of its workers is not quite dead. Whoever reads or changes what the runs say
locks the folder first, so that no two choose the same GPU. No clock decides anything.

Runs in an agent. The files of others are checked; but these locks only advise, and a user who writes false files there
can keep GPUs from others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ddplaunch.features.free_gpus.records import GpuUser as GpuUser
from ddplaunch.protocol import wire
from ddplaunch.system import procfs
from ddplaunch.system.files import kept_files

FOLDER_VARIABLE = "DDPLAUNCH_LOCK_DIR"
HIDE_VARIABLE = "DDPLAUNCH_HIDE_RUN"
_NAME = "ddplaunch-gpus"
_SHARED_FOLDERS = ("/run/lock", "/dev/shm", "/tmp")
_SHARED = stat.S_ISVTX | stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO

_FILE_BYTES = 16 << 10
"""Of each file, from its begin on: a change then needs no space on a disk that has become full."""

_LISTED_S = 2.0
_MAX_TICKET = 1 << 40
"""A file of another user may say anything."""

_PAUSE_S = 0.005
_ENDED, _SUSPENDED = (b"Z", b"X"), (b"T", b"t")


def folder() -> str:
    """That of DDPLAUNCH_LOCK_DIR, or the same for all users of the machine."""
    shared = (base for base in _SHARED_FOLDERS if _is_shared(base))
    return os.environ.get(FOLDER_VARIABLE) or os.path.join(next(shared, _SHARED_FOLDERS[-1]), _NAME)


def _is_shared(path: str) -> bool:
    try:
        return stat.S_IMODE(os.lstat(path).st_mode) & _SHARED == _SHARED
    except OSError:
        return False


@contextlib.contextmanager
def locked(limit_s: float) -> Iterator[int]:
    """The folder's descriptor. Until it is closed, at the end, nobody else reads or changes the register.

    Raises:
        OSError: the folder cannot be used, or another process has locked it for ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    opened = _open_folder(folder(), deadline)
    try:
        while not _has_locked(opened, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"{_who_locks(opened)} has locked it for {limit_s:g} s")
            time.sleep(_PAUSE_S)
        yield opened
    finally:
        os.close(opened)


def _who_locks(opened: int) -> str:
    """``process 4711 of alice``, as /proc/locks names it (proc_locks(5)); in a container perhaps not."""
    found = os.fstat(opened)
    file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    lines = (line.split() for line in procfs.read("/proc/locks").decode().splitlines())
    pids = [words[4] for words in lines if words[1] == "FLOCK" and words[5] == file and words[4].isdigit()]
    with contextlib.suppress(OSError, IndexError):
        return f"process {pids[0]} of {_name_of(os.stat(f'/proc/{pids[0]}').st_uid)}"
    return "another process"


def _open_folder(path: str, deadline: float) -> int:
    """Creates it if it is missing. A link is not followed."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
        os.chmod(path, _SHARED)
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while not _may_use(opened):
            if time.monotonic() >= deadline:
                raise PermissionError(errno.EACCES, "not all users may write there (its mode is not 1777)")
            time.sleep(_PAUSE_S)  # Another process may just have created it.
    except OSError:
        os.close(opened)
        raise
    return opened


def _may_use(opened: int) -> bool:
    """Whether all users share the folder. One of this user's alone may be named by DDPLAUNCH_LOCK_DIR."""
    found = os.fstat(opened)
    if stat.S_IMODE(found.st_mode) & _SHARED == _SHARED:
        return True
    if found.st_uid == os.geteuid() and not os.environ.get(FOLDER_VARIABLE):
        os.fchmod(opened, _SHARED)  # It was killed between the two steps above.
        return True
    return found.st_uid == os.geteuid()


def _has_locked(opened: int, how: int) -> bool:
    try:
        fcntl.flock(opened, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class OwnFile:
    """The file of this agent in the register. No other process inherits its lock."""

    def __init__(self, opened: int, run: GpuUser) -> None:
        """Writes the file into the folder, which is locked.

        Raises:
            OSError: it cannot be written.
        """
        self.name = f"{run.pid}.{os.urandom(4).hex()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self.name, flags, 0o600, dir_fd=opened)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.write(run)
            os.fchmod(self._fd, 0o644)
        except OSError:
            self.remove(opened)
            raise

    def write(self, run: GpuUser) -> None:
        """Replace what it says. The folder is locked, or nobody reads the file yet. Raises OSError."""
        data = wire.encode(run)
        if len(data) > _FILE_BYTES:
            data = wire.encode(replace(run, processes=()))
        if os.pwrite(self._fd, data.ljust(_FILE_BYTES), 0) < _FILE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def remove(self, opened: int | None = None) -> None:
        """The run uses no GPU any more."""
        with contextlib.suppress(OSError):
            os.unlink(self.name if opened is not None else os.path.join(folder(), self.name), dir_fd=opened)
        kept_files.close(self._fd)


def users(opened: int, own: str = "") -> list[GpuUser]:
    """The runs in the folder, which is locked, but for that of the file ``own``. Files of runs that ended go."""
    return [run for name in sorted(os.listdir(opened)) if name != own and (run := _user(opened, name))]


def listed() -> list[GpuUser]:
    """The runs in the folder, to be shown; none if it is missing. Raises OSError as ``locked``."""
    if not os.path.lexists(folder()):
        return []
    with locked(_LISTED_S) as opened:
        return users(opened)


def waiting(found: Iterable[GpuUser]) -> list[GpuUser]:
    """Those of ``found`` that wait, the first to get GPUs first. A suspended one lets others pass until it goes on."""
    return sorted((each for each in found if each.ticket and not _is_suspended(each)), key=order)


def order(user: GpuUser) -> tuple[int, int]:
    """The key of the order in which runs that wait get GPUs."""
    return user.ticket, user.pid


def next_ticket(found: Iterable[GpuUser]) -> int:
    """The ticket of a run that waits behind all of ``found``. The folder is locked."""
    return 1 + max((each.ticket for each in found if each.ticket < _MAX_TICKET), default=0)


def _is_suspended(user: GpuUser) -> bool:
    return any(_state(*process) in _SUSPENDED for process in user.processes[:1])


def _user(opened: int, name: str) -> GpuUser | None:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_size > _FILE_BYTES:
            return None
        run = _read(fd, found.st_uid)
        if not _has_locked(fd, fcntl.LOCK_SH) or (run and any(_runs(*process) for process in run.processes)):
            return run
        with contextlib.suppress(OSError):  # Of another user.
            os.unlink(name, dir_fd=opened)
        return None
    finally:
        os.close(fd)


def _read(fd: int, uid: int) -> GpuUser | None:
    """Also of another version of ddplaunch; None if it is no such file."""
    try:
        run = wire.salvage(GpuUser, json.loads(os.read(fd, _FILE_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None
    return replace(run, user=_name_of(uid)) if run else None


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def started(pid: int) -> tuple[int, int]:
    """The process as in ``GpuUser.processes``."""
    fields = procfs.stat(pid)
    return (pid, int(fields[procfs.STARTED])) if fields else (0, 0)


def _runs(pid: int, started: int) -> bool:
    """Whether this process has not ended. One that cannot be seen from here counts as ended."""
    return _state(pid, started) not in (b"", *_ENDED)


def _state(pid: int, started: int) -> bytes:
    """The letter of proc(5); empty if this process cannot be seen from here."""
    fields = procfs.stat(pid) if pid else []
    return fields[procfs.STATE] if fields and int(fields[procfs.STARTED]) == started else b""
