"""nodes.json in the state folder: what runs have found out about nodes, shared by all launchers of the user.

Runs in the launcher and in commands. Reading needs no lock: the file is replaced as a whole. A change is made under a
lock, so that launchers which end at once lose nothing. A process that was stopped while it held the lock loses it after
``LOCK_S``; when it goes on, it notices that, and starts again. What the entries mean is not known here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ddplaunch.system.files import kept_files, run_folder

if TYPE_CHECKING:
    from pathlib import Path

FILE = "nodes.json"
_LOCK = ".nodes.lock"
_ASIDE = "nodes.json.damaged"

SCHEMA = 1
"""Version of the keys of nodes.json."""

LOCK_S = 0.5
"""After so many seconds a lock is taken from the process that holds it: a change takes milliseconds."""

_GIVE_UP_S = 5.0
_RETRY_S = 0.01
_MAX_BYTES = 16 << 20

Entries = list[Any]


class Damaged(Exception):
    """The file is not what this module has written."""


def of_user() -> Path | None:
    """The path of the file; None for a user without a home."""
    base = run_folder.base_at_home(os.environ)
    return base / FILE if base else None


def read(path: Path) -> Entries:
    """The entries, as JSON values of any kind; empty if there is no file.

    Raises:
        Damaged: it is no regular file, no JSON, too large, or of another version.
        OSError: it cannot be read.
    """
    try:
        with kept_files.open_regular(path) as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return []
    except kept_files.NotRegular as error:
        raise Damaged from error
    if len(data) > _MAX_BYTES:
        raise Damaged
    return _entries(data)


def _entries(data: bytes) -> Entries:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged from error
    entries = body.get("nodes") if isinstance(body, dict) and body.get("schema") == SCHEMA else None
    if not isinstance(entries, list):
        raise Damaged
    return entries


def change(path: Path, new: Callable[[Entries], Entries]) -> None:
    """Replace the entries by ``new(entries)``, which may be called again; other processes wait.

    A damaged file is set aside first: ``new`` then starts from no entries.

    Raises:
        OSError: the file cannot be read or written.
    """
    run_folder.make_private(path.parent)
    give_up_at = time.monotonic() + _GIVE_UP_S
    while time.monotonic() < give_up_at:
        with _locked(path.with_name(_LOCK), give_up_at) as still_holds:
            before = _read_or_set_aside(path)
            after = new(before)
            text = json.dumps({"schema": SCHEMA, "nodes": after}, indent=1) + "\n"
            if after == before or kept_files.write_whole(path, text, may_replace=still_holds):
                return
    raise TimeoutError(f"{path} is being changed by other processes")


def _read_or_set_aside(path: Path) -> Entries:
    try:
        return read(path)
    except Damaged:
        os.replace(path, path.with_name(_ASIDE))
        return []


@contextlib.contextmanager
def _locked(lock: Path, give_up_at: float) -> Iterator[Callable[[], bool]]:
    """Hold the lock; the value tells whether this process still holds it."""
    fd = _acquire(lock, give_up_at)
    try:
        yield lambda: _is_current(lock, fd)
    finally:
        kept_files.close(fd)


def _acquire(lock: Path, give_up_at: float) -> int:
    take_at = time.monotonic() + LOCK_S
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if _try_lock(fd) and _is_current(lock, fd):
            return fd
        now = time.monotonic()
        if now > take_at and _is_current(lock, fd):  # The next turn makes a new file, which nobody has locked.
            lock.unlink(missing_ok=True)
            take_at = now + LOCK_S
        kept_files.close(fd)
        if now > give_up_at:
            raise TimeoutError(f"{lock} is held by other processes")
        time.sleep(_RETRY_S)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # Some file systems have no locks.
        return True
    return True


def _is_current(lock: Path, fd: int) -> bool:
    """Whether ``fd`` is of the file that has the lock's name now."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.stat(lock), os.fstat(fd))
    return False
