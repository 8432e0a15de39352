"""A copy that stands at a path of its own, as an environment of ``--env pack`` does: that path is a link to the copy.

Runs in an agent without a run, while it holds the folder of the copies. That is beside the path, on the same disk:
``.ddplaunch-NAME``, with a copy for each content, one at most when all is done. A link changes at once: whoever uses
the path finds a whole copy, the old one or the new one. Those who use a copy hold its marker by a shared flock(2).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator

from ddplaunch.errors import LaunchError
from ddplaunch.features.snapshot import old_copies
from ddplaunch.features.snapshot.records import MARKER
from ddplaunch.text import quote, size

_OTHERS_WRITE = 0o022


def folder_of(place: str) -> str:
    """The folder of the copies for this path."""
    return os.path.join(os.path.dirname(place), f".ddplaunch-{os.path.basename(place)}")


def is_ours(place: str) -> bool:
    """Whether the path is a link to a copy, perhaps one that was deleted."""
    return os.path.islink(place) and os.path.dirname(_target(place)) == folder_of(place)


def begin(place: str) -> str:
    """Make the folder of the copies. Returns its path.

    Raises:
        LaunchError: what stands at the path is no copy of ours, or another user could change the copies.
        OSError: the folder cannot be made.
    """
    if os.path.lexists(place) and not is_ours(place):
        raise LaunchError(f"{quote(place, 500)} exists and is not a copy of ours: it is left as it is")
    folder = folder_of(place)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
        raise LaunchError(f"{quote(folder, 500)}: other users can write there")
    return folder


def check(place: str, nbytes: int) -> None:
    """Whether the path may get another copy, for which ``nbytes`` are missing.

    Raises:
        LaunchError: workers use the present one, or there is no room.
    """
    with _alone(place):
        pass
    disk = os.statvfs(folder_of(place))
    free = disk.f_bavail * disk.f_frsize
    if nbytes > free:
        raise LaunchError(f"{quote(place, 500)} needs {size(nbytes)}, and its disk has only {size(free)} left")


def remove_parts(place: str) -> None:
    """Remove what killed agents have left of copies that they were making."""
    folder = folder_of(place)
    for entry in old_copies.scan(folder):
        if entry.name.startswith(old_copies.PART):
            shutil.rmtree(entry.path, ignore_errors=True)


def put(copy: str, place: str) -> None:
    """Have the path lead to this copy, and delete others. Raises LaunchError: workers use the present one."""
    if _target(place) != copy:
        with _alone(place):
            link = os.path.join(os.path.dirname(copy), f"{old_copies.PART}{os.urandom(6).hex()}")
            os.symlink(copy, link)
            os.replace(link, place)
    for entry in old_copies.scan(os.path.dirname(copy)):
        if entry.path != copy and os.path.exists(os.path.join(entry.path, MARKER)):
            with contextlib.suppress(OSError):
                old_copies.delete(entry.path)


@contextlib.contextmanager
def _alone(place: str) -> Iterator[None]:
    """Nobody begins to use the present copy in the ``with`` block. Raises LaunchError: somebody uses it."""
    try:
        fd = os.open(os.path.join(place, MARKER), os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # There is none.
        yield
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        text = f"a run uses {quote(place, 500)}, and the launcher's differs by now: wait for the end of that run"
        raise LaunchError(text) from None
    finally:
        os.close(fd)


def _target(place: str) -> str:
    try:
        return os.readlink(place)
    except OSError:
        return ""
