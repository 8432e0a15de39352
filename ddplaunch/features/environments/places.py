"""Where environments are on this machine, and the files that were sent for them; deletes what is old.

Everything is below a folder of the user, which nobody else can write: ``environments/NAME-HASH`` has an environment,
``NAME-HASH.lock`` beside it is held by who makes it or deletes it, and ``files`` has what was sent, by its hash. Runs
in an agent without a run, or in the process of the command.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ddplaunch.errors import LaunchError
from ddplaunch.features import mounts
from ddplaunch.features.environments.queries import MARKER, PART_BYTES, OfferedFile, PutFilePart, WantedFile
from ddplaunch.features.snapshot import content
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.features.environments.queries import MakeEnvironment

LOCAL = "/var/tmp"
"""A folder on the machine's own disk, which outlasts a reboot; anybody may write in it."""

_FOLDER, _FILES = "environments", "files"
_KEPT_S = 30 * 86400.0
_KEPT_HALF_MADE_S = 86400.0
_OTHERS_WRITE = 0o022
_OTHER_LIBC = "another libc"

_parts: dict[str, tuple[str, int]] = {}
"""By path, what has arrived in this process of files that are not complete."""


def base_folder(given: str) -> str:
    """The folder of this user for environments on this machine: ``given``, or the cache folder, if it is on a disk.

    Raises:
        LaunchError: there is none, or others can write in it.
    """
    uid = os.getuid()
    local = os.path.join(LOCAL, f"ddplaunch-{uid}")
    if given:
        return _own(os.path.join(os.path.abspath(os.path.expanduser(given)), f"ddplaunch-{uid}"))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(cache, "ddplaunch")
    if os.path.isabs(folder) and not mounts.is_shared(mounts.mount_of(os.path.realpath(cache))[0]):
        with contextlib.suppress(OSError):  # A home that is read-only, or missing.
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if os.access(folder, os.W_OK):
                return _own(folder)
    return _own(local)


def _own(folder: str) -> str:
    """``folder``, which is made if needed.

    Raises:
        LaunchError: it cannot be made, or is not this user's alone.
    """
    hint = "--env-dir names another folder for environments."
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        raise LaunchError(f"{quote(folder, 500)}: {error.strerror}", hint) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _OTHERS_WRITE:
        raise LaunchError(f"{quote(folder, 500)}: other users can write there", hint)
    return folder


def environment_folder(base: str, order: MakeEnvironment, python: str) -> str:
    """The folder of the environment, named by all that determines it, with the processor and libc of this machine.

    ``python``: the interpreter with which it is made, or uv's request for one.
    """
    key = json.dumps([order.digest, python, os.uname().machine, libc()])
    return os.path.join(base, _FOLDER, f"{order.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}")


def libc() -> str:
    """Name and version of this machine's libc, like ``glibc 2.39``."""
    with contextlib.suppress(ValueError, OSError):
        return os.confstr("CS_GNU_LIBC_VERSION") or _OTHER_LIBC
    return _OTHER_LIBC


@contextlib.contextmanager
def locked(path: str, told: Callable[[str], None] | None) -> Iterator[int | None]:
    """Hold the file ``path`` in the ``with`` block, against other processes; yields its descriptor.

    A process that inherits the descriptor holds the file, too. While another one has it, ``told`` is called each
    second, and may raise; without ``told`` the block gets None at once.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if not _lock(fd, told):
                yield None
                return
            # Who deletes an environment deletes the file while holding it: then another one has its name.
            if os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
                yield fd
                return
        finally:
            os.close(fd)


def _lock(fd: int, told: Callable[[str], None] | None) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not told:
                return False
        else:
            return True
        told("another command makes it")
        time.sleep(1)


def delete_old(base: str, used: str) -> None:
    """Delete environments that were not used for a month, and what is left of one that was not completed."""
    folder, now = os.path.join(base, _FOLDER), time.time()
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):  # Another command deletes it, too.
            marker = os.path.join(path, MARKER)
            is_complete = os.path.exists(marker)
            age_s = now - os.stat(marker if is_complete else path).st_mtime
            limit_s = _KEPT_S if is_complete else _KEPT_HALF_MADE_S
            if path != used and age_s > limit_s and not name.endswith(".lock"):
                with locked(f"{path}.lock", None) as lock:
                    if lock is not None:
                        remove(path)
                        os.unlink(f"{path}.lock")
    for file in glob.glob(os.path.join(glob.escape(base), _FILES, "*")):
        with contextlib.suppress(OSError):
            if now - os.stat(file).st_mtime > _KEPT_S:
                os.unlink(file)


def remove(folder: str) -> None:
    """Delete an environment, its marker first: what is left of it after an interruption is not complete."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, MARKER))
    shutil.rmtree(folder, ignore_errors=True)


# Files that were sent.


def file_path(base: str, file: OfferedFile) -> str:
    """Where the file is when it has arrived."""
    return os.path.join(base, _FILES, file.hash)


def wanted(base: str, file: OfferedFile) -> WantedFile | None:
    """What is missing of a file; None: it is here, and is not deleted soon.

    Raises:
        OSError: no file can be made.
    """
    path = file_path(base, file)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    if os.path.exists(path):
        os.utime(path)
        return None
    have = os.fstat(_part(path)[1]).st_size
    return WantedFile(file.hash, have if have < file.nbytes else 0)


def _part(path: str) -> tuple[str, int]:
    """Where this process writes what has arrived of the file ``path``: a path, and its descriptor.

    Hosts may share the folder, and other agents may run on this one: each writes a file of its own. That of the last
    transfer to this host which was cut off is continued, unless another process has it.
    """
    host, pid = os.uname().nodename.replace("/", "_"), os.getpid()
    for part in (f"{path}.{host}.part", f"{path}.{host}.{pid}.part"):
        if path in _parts:
            break
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o700)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _parts[path] = part, fd
        except BlockingIOError:
            os.close(fd)
    return _parts[path]


def keep(base: str, received: PutFilePart) -> None:
    """Write the part; a file that is complete gets its name.

    Raises:
        OSError: no room on the disk. ValueError: it is not what was sent.
    """
    path = os.path.join(base, _FILES, received.hash)
    part, fd = _part(path)
    data = base64.b64decode(received.data)[:PART_BYTES]
    if os.pwrite(fd, data, received.offset) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), part)
    if received.offset + len(data) >= received.size:
        del _parts[path]
        arrived = f"{part}.{os.getpid()}"
        with open(fd, "rb") as file:
            is_whole = content.digest(file, None) == received.hash
            os.fsync(fd)
            os.replace(part, arrived)  # Nobody else continues it.
        if not is_whole:
            os.unlink(arrived)
            raise ValueError("a file has not arrived as it was sent")
        os.replace(arrived, path)  # It may be a program, which nobody can run while it is open for writing.


def write(folder: str, files: dict[str, str]) -> None:
    """Write these texts below ``folder``; a path that leads out of it is refused with a ValueError."""
    for path, text in files.items():
        if any(name in ("", ".", "..") for name in path.split("/")):
            raise ValueError(f"a file is outside of the folder: {quote(path)}")
        os.makedirs(os.path.dirname(os.path.join(folder, path)), mode=0o700, exist_ok=True)
        kept_files.write_whole(os.path.join(folder, path), text.encode("utf-8", "surrogateescape"))
