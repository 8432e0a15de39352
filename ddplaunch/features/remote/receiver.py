"""Finds the launcher's ddplaunch on a machine on which it is not installed, or receives it: ``receive``.

Runs on the node, before anything of ddplaunch is loaded there: the launcher sends the text of this file (``package``).
Must import only the standard library, of all versions of Python that ddplaunch allows.

A copy is a folder whose name is a hash of its files. It is written beside that, and gets its name when it is
whole. A crash of the machine may lose the contents of new files: after each boot, the first process that uses a copy
checks it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_PATH = re.compile(r"(\w+/)*\w+\.py")
_LOCK, _PART, _CHECKED = ".lock", ".part-", ".checked-"
_KEEP_COPIES, _KEEP_S, _KEEP_MORE_S = 5, 30 * 86400.0, 86400.0
"""So many copies are kept for so long after their last use; further ones, and what was cut off, for a day."""

_OTHERS_S, _LOOK_S = 20.0, 0.05
"""So long a process waits for another one, of the same user, that receives a copy into the same folder."""


def receive(wanted: Mapping[str, str], roots: Sequence[str], bases: Sequence[str], needed: Callable[[], bytes]) -> str:
    """The folder with the launcher's ddplaunch. It is not deleted before this process ends.

    Args:
        wanted: ``content``, the hash of ddplaunch's files, and ``name``, that of all files of a copy.
        roots: folders that perhaps have a ddplaunch: one with that content is used, if there is no copy yet.
        bases: folders for copies, in which this user can perhaps write; the first one that works is used.
        needed: asks the launcher for the files.

    Raises:
        OSError: no copy can be written; the text names each folder, and the reason.
        ValueError: what has arrived is not what the launcher has sent.
    """
    folders = [os.path.expanduser(base.format(uid=os.geteuid())) for base in bases]
    copied = [folder for folder in folders if os.path.isdir(os.path.join(folder, wanted["name"]))]
    for root in () if copied else roots:  # To read all files may take long there.
        with contextlib.suppress(OSError):
            if digest(files_of(root, ["ddplaunch"])) == wanted["content"]:
                return root
    files, problems = functools.cache(lambda: _checked(needed(), wanted["name"])), []
    for base in (*copied, *folders):
        try:
            return _in(base, wanted["name"], files)
        except OSError as error:
            problems.append(f"{error.filename or base}: {error.strerror}")
    raise OSError("; ".join(problems))


def digest(files: Iterable[tuple[str, bytes]]) -> str:
    """A hash of files, each with its path."""
    found = hashlib.sha256()
    for path, data in sorted(files):
        found.update(f"{path} {hashlib.sha256(data).hexdigest()}\n".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def files_of(root: str, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """The Python files among these files and folders of ``root``: path relative to it, and contents."""
    for name in names:
        below = os.walk(os.path.join(root, name))
        folders = ((folder, names) for folder, _, names in below) if not name.endswith(".py") else [(root, [name])]
        for folder, inside in folders:
            for path in (os.path.join(folder, each) for each in inside if each.endswith(".py")):
                with open(path, "rb") as file:
                    yield os.path.relpath(path, root), file.read()


def _checked(data: bytes, name: str) -> dict[str, bytes]:
    files = {path: text.encode() for path, text in json.loads(zlib.decompress(data)).items()}
    if digest(files.items()) != name or not all(map(_PATH.fullmatch, files)):
        raise ValueError("ddplaunch has not arrived as it was sent")
    return files


def _in(base: str, name: str, files: Callable[[], dict[str, bytes]]) -> str:
    _make_private(base)
    copy = os.path.join(base, name)
    with _alone(base):
        if not _is_whole(copy, name):
            _write(copy, files())
            _delete_old(base)
        # As long as this descriptor is open, the copy is in use; also for systemd-tmpfiles, which cleans /tmp.
        fd = os.open(copy, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.utime(fd)
    return copy


def _make_private(base: str) -> None:
    """Create the folder. Raises PermissionError if another user could write in it."""
    os.makedirs(base, mode=0o700, exist_ok=True)
    found = os.lstat(base)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(1, "another user may write in it", base)


@contextlib.contextmanager
def _alone(base: str) -> Iterator[None]:
    """No other process writes a copy there meanwhile. One that takes too long is not waited for: no harm is done."""
    fd = os.open(os.path.join(base, _LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _OTHERS_S
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK_S)
            except OSError:  # A file system without locks.
                break
        yield
    finally:
        os.close(fd)


def _is_whole(copy: str, name: str) -> bool:
    """Whether there is a copy, with all its files as they were sent. One that is damaged is deleted."""
    if not os.path.isdir(copy):
        return False
    mark = _mark(copy)
    if not os.path.exists(mark):
        tops = [each for each in os.listdir(copy) if not each.startswith(".")]
        if digest(files_of(copy, tops)) != name:
            _delete(copy)
            return False
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return True


def _mark(copy: str) -> str:
    """The file that says that the copy has been checked since the machine was started; without /proc, at all."""
    boot_id = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    return os.path.join(copy, f"{_CHECKED}{boot_id}")


def _write(copy: str, files: Mapping[str, bytes]) -> None:
    part = os.path.join(os.path.dirname(copy), f"{_PART}{os.urandom(6).hex()}")
    try:
        for path, data in files.items():
            os.makedirs(os.path.dirname(os.path.join(part, path)), mode=0o700, exist_ok=True)
            with open(os.path.join(part, path), "xb") as file:
                file.write(data)
        open(_mark(part), "xb").close()
        os.rename(part, copy)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        if not os.path.isdir(copy):  # Another process has not waited.
            raise


def _delete(copy: str) -> None:
    """What has the name of a copy is whole: it loses the name first."""
    part = os.path.join(os.path.dirname(copy), f"{_PART}{os.urandom(6).hex()}")
    os.rename(copy, part)
    shutil.rmtree(part, ignore_errors=True)


def _delete_old(base: str) -> None:
    """Delete copies that were not used for long and are not in use, and what was cut off. Errors are ignored."""
    with contextlib.suppress(OSError):
        used_at = {each.path: each.stat(follow_symlinks=False).st_mtime for each in os.scandir(base)}
        del used_at[os.path.join(base, _LOCK)]
        newest = sorted(used_at, key=lambda path: used_at[path])[-_KEEP_COPIES:]
        for path, used_s in used_at.items():
            is_kept = path in newest and not os.path.basename(path).startswith(_PART)
            if time.time() - used_s > (_KEEP_S if is_kept else _KEEP_MORE_S):
                _delete_unused(path)


def _delete_unused(copy: str) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(copy, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete(copy)
        finally:
            os.close(fd)
