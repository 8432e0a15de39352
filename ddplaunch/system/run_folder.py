"""The run folder with logs, report.txt and report.json: created, locked, and pruned to the newest 20.

Used by the launcher and, for a node's logs, by the agent. Folders are private to the user. Must not delete a folder of
a run that may still be running, or one that ddplaunch did not create.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KEEP_RUNS = 20
_LOCK = ".ddplaunch-run"
_SAME_RUN_S = 60.0
"""Folders of one name that were created within this time belong to one run."""

_MAX_RUN_S = 30 * 24 * 3600.0

_held: dict[Path, int] = {}
"""Descriptors of the locks that this process holds."""


def new_run_id() -> str:
    """A unique name that sorts by time: ``20261120-193012-a1b2c3``."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def base_at_home(environ: Mapping[str, str]) -> Path | None:
    """``$XDG_STATE_HOME/ddplaunch``, or below ``~/.local/state`` (XDG Base Directory Specification).

    None for a user without a home, as in a container with an arbitrary user id.
    """
    state = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):
        return Path(state, "ddplaunch")
    home = os.path.expanduser("~") if environ.get("HOME", "~") else ""
    return Path(home, ".local/state/ddplaunch") if os.path.isabs(home) else None


def default_base(environ: Mapping[str, str]) -> Path:
    """``base_at_home``, or without a home a new temporary folder; if none can be created, a path that does not exist.

    Never raises: where no folder can be created, ``create`` and ``share`` fail.
    """
    base = base_at_home(environ)
    if base:
        return base
    import tempfile

    try:
        return Path(tempfile.mkdtemp(prefix="ddplaunch-"))
    except OSError:
        return Path("/tmp", f"ddplaunch-{os.urandom(6).hex()}")


def create(base: Path, run_id: str) -> Path:
    """Create the folder ``base/run_id``, with a suffix if that exists; locked until ``released`` ends.

    Raises:
        UsageError: ``base`` exists and is not a folder.
        OSError: the folder cannot be created.
    """
    if base.exists() and not base.is_dir():
        raise UsageError(f"--log-dir {base}: is a file", "Give a folder; it is created if it does not exist.")
    _make_private(base)
    for folder in _candidates(base, run_id):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            _lock(folder)
            return folder
    raise FileExistsError(f"{base / run_id} and its alternatives exist already")


def _make_private(folder: Path) -> None:
    """Create ``folder`` and its missing parents for this user alone, whatever the umask."""
    for path in reversed((folder, *folder.parents)):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)


def _candidates(base: Path, name: str) -> Iterator[Path]:
    """Names to try: numbers first, then random ones, so that hundreds of launchers do not all try equal names."""
    yield base / name
    yield from (base / f"{name}.{number}" for number in range(2, 10))
    yield from (base / f"{name}.{os.urandom(3).hex()}" for _ in range(100))


def share(base: Path, name: str, host: str) -> Path:
    """Create the folder ``base/name/host``; on a shared file system ``base/name`` may exist already.

    If an earlier run of that name left a folder for this host, or if another user may have made ``base/name``, the name
    gets a suffix. Does not raise: where no folder
    can be created, writing to it fails later.
    """
    for folder in _candidates(base, name):
        try:
            _make_private(folder)
            if not _is_own(folder):
                continue
            (folder / host).mkdir(mode=0o700)
        except FileExistsError:
            continue
        except OSError:
            break
        with contextlib.suppress(OSError):  # On a shared file system the launcher holds the lock.
            _lock(folder, fcntl.LOCK_SH)
        return folder / host
    return base / name / host


def _is_own(folder: Path) -> bool:
    """Whether no other user made ``folder``: where others can write, it may be a symbolic link or their folder."""
    made = os.lstat(folder)
    is_public = folder.parent.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(made.st_mode) and (made.st_uid == os.geteuid() or not is_public)


def _lock(folder: Path, how: int = fcntl.LOCK_EX) -> None:
    """Lock the folder; the open descriptor holds the lock, so it ends with this process."""
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.write(fd, f"{os.uname().nodename}\n".encode())
    _held.setdefault(folder, fd)
    with contextlib.suppress(OSError):  # Some file systems have no locks.
        fcntl.flock(fd, how | fcntl.LOCK_NB)


@contextlib.contextmanager
def released(folder: Path | None) -> Iterator[None]:
    """Release the lock of ``create`` at the end of the ``with`` block."""
    try:
        yield
    finally:
        if folder in _held:
            os.close(_held.pop(folder))


def prune(base: Path) -> None:
    """Delete all but the newest ``KEEP_RUNS`` runs below ``base``, except runs that may still be running."""
    with contextlib.suppress(OSError):
        folders = [entry for entry in base.iterdir() if (entry / _LOCK).is_file() and not entry.is_symlink()]
        for run in _runs(folders)[:-KEEP_RUNS]:
            for folder in run:
                if not _is_in_use(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _runs(folders: list[Path]) -> list[list[Path]]:
    """Folders by run, oldest first. One launcher per node or worker creates many folders of one name within seconds."""
    runs: list[list[Path]] = []
    latest: dict[str, tuple[float, list[Path]]] = {}
    for created_s, folder in sorted(((folder / _LOCK).stat().st_mtime, folder) for folder in folders):
        name = re.sub(r"\.([0-9]{1,4}|[0-9a-f]{6})$", "", folder.name)
        before_s, run = latest.get(name, (0.0, []))
        if not run or created_s - before_s > _SAME_RUN_S:
            run = []
            runs.append(run)
        run.append(folder)
        latest[name] = (created_s, run)
    return runs


def _is_in_use(folder: Path) -> bool:
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)  # NFS locks only files open for writing.
    except OSError:
        return True
    with os.fdopen(fd, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return _may_be_running(folder)
        # On some file systems a lock is visible only on the machine that holds it.
        return not set(lock.read().split()) <= {os.uname().nodename.encode()} and _may_be_running(folder)


def _may_be_running(folder: Path) -> bool:
    """For a run whose lock is not reliable: it is young and has no report."""
    is_young = time.time() - (folder / _LOCK).stat().st_mtime < _MAX_RUN_S
    return is_young and not (folder / "report.json").exists()


def working_folder() -> str:
    """Path of the current working directory.

    Raises:
        LaunchError: the directory has been deleted.
    """
    try:
        return os.getcwd()
    except OSError as error:
        hint = "The directory was deleted, and perhaps created again: `cd` into it once more."
        raise LaunchError(f"the working directory: {error.strerror}", hint, NODE_NOT_READY) from None
