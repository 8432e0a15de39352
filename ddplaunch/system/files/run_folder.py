"""The run folder with logs, report.txt and report.json: created, and locked while the run goes on.

Used by the launcher and, for a node's logs, by the agent. Folders are private to the user. The feature ``keep_runs``
deletes old ones.

Where every node, or every worker, has a launcher, each of them creates a folder. Once the nodes have met, the folders
are moved into one folder of the run, which has the marker ``NODES``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ddplaunch.errors import UsageError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.system.files import kept_files

LOCK = ".ddplaunch-run"
"""File in a run folder: marks it as ours, and holds the lock."""

RUN, REPORT, FAILURE_PAGE = "run.json", "report.json", "report.txt"

NODES = ".ddplaunch-nodes"
"""File in a folder that has a folder for each launcher of a run; holds the key of that run."""

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The start of a run, as its launcher writes it to run.json. What could not be read is empty.

    Attributes:
        script: path of the script, name of the module, or program.
        command: the command line of the launcher's process, as it was typed.
        cwd: working directory of that process; empty if it was deleted.
        start: time of the start, by that machine's clock: ISO 8601 with zone.
        host: name of that machine.
        pid: of that process.
        line_prefix: the template of the prefix of the workers' lines on the console and in console.log.
    """

    run_id: str = ""
    run_tag: str = ""
    script: str = ""
    command: tuple[str, ...] = ()
    cwd: str = ""
    start: str = ""
    host: str = ""
    pid: int = 0
    line_prefix: str = ""


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
    if os.path.exists(base) and not os.path.isdir(base):
        raise UsageError(f"--log-dir {base}: is a file", "Give a folder; it is created if it does not exist.")
    make_private(base)
    for folder in _candidates(base, run_id):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            _lock(folder)
            return folder
    raise FileExistsError(f"{base / run_id} and its alternatives exist already")


def make_private(folder: Path) -> None:
    """Create ``folder`` and its missing parents for this user alone, whatever the umask."""
    for path in reversed((folder, *folder.parents)):
        if not os.path.exists(path):
            path.mkdir(mode=0o700, exist_ok=True)


def _candidates(base: Path, name: str) -> Iterator[Path]:
    """Names to try: numbers first, then random ones, so that hundreds of launchers do not all try equal names."""
    yield base / name
    yield from (base / f"{name}.{number}" for number in range(2, 10))
    yield from (base / f"{name}.{os.urandom(3).hex()}" for _ in range(100))


def share(base: Path, name: str, host: str) -> Path:
    """Create the folder ``base/name/host``; on a shared file system ``base/name`` may exist already.

    If an earlier run of that name left a folder for this host, or if another user may have made ``base/name``, the name
    gets a suffix. Does not raise: where no folder can be created, writing to it fails later.
    """
    for folder in _candidates(base, name):
        try:
            make_private(folder)
            if not is_own(folder):
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


def move_into_run(folder: Path, run_id: str, run_key: str, names: Sequence[str]) -> Path:
    """Move ``folder``, made by ``create``, into the folder ``run_id`` beside it. Files that are open stay open.

    The launchers of one run, which have one ``run_key``, share that folder; if another run has it, ``run_id`` gets a
    suffix. ``names`` are names to try; if all exist, because an earlier launcher of this run was on this host, the last
    one gets a suffix. Returns the new path.

    Raises:
        OSError: nothing was moved.
    """
    for shared in _candidates(folder.parent, run_id):
        if _joins(shared, run_key):
            for path in (*(shared / name for name in names), *_candidates(shared, names[-1])):
                if _rename(folder, path):
                    return path
    raise FileExistsError(errno.EEXIST, f"{run_id} and its alternatives exist already")


def _joins(shared: Path, run_key: str) -> bool:
    """Create the folder of the run with this key, unless it exists. False: another run has that name."""
    if not os.path.lexists(shared):
        made = shared.with_name(f".{os.urandom(6).hex()}")
        made.mkdir(mode=0o700)
        try:
            (made / NODES).write_text(run_key)
            if _rename(made, shared):  # With its key at once: other launchers of the run may come now.
                return True
        finally:
            with contextlib.suppress(FileNotFoundError):
                (made / NODES).unlink(missing_ok=True)
                made.rmdir()
    try:
        return is_own(shared) and (shared / NODES).read_text() == run_key
    except (OSError, ValueError):
        return False


def _rename(folder: Path, path: Path) -> bool:
    """Rename ``folder`` to ``path``. False: that exists, and is no empty folder."""
    try:
        folder.rename(path)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    return True


def is_own(folder: Path, opened: int | None = None) -> bool:
    """Whether no other user made ``folder``: where others can write, it may be a symbolic link or their folder.

    ``opened``: its descriptor, for a reader: nobody can put another folder in its place any more.

    Raises:
        OSError: there is no such folder, or it cannot be looked at.
    """
    made = os.lstat(folder) if opened is None else os.fstat(opened)
    return stat.S_ISDIR(made.st_mode) and (made.st_uid == os.geteuid() or not is_public(folder.parent))


def is_public(folder: Path) -> bool:
    """Whether other users can write in the folder. Raises OSError."""
    return bool(folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _lock(folder: Path, how: int = fcntl.LOCK_EX) -> None:
    """Lock the folder; the open descriptor holds the lock, so it ends with this process."""
    fd = kept_files.open_to_append(folder / LOCK, os.O_RDWR)
    _held.setdefault(folder, fd)
    with contextlib.suppress(OSError):  # The lock counts, also on a full disk.
        os.write(fd, f"{os.uname().nodename}\n".encode())
    with contextlib.suppress(OSError):  # Some file systems have no locks.
        fcntl.flock(fd, how | fcntl.LOCK_NB)


def held_fds() -> frozenset[int]:
    """Descriptors of this process that hold the locks of run folders."""
    return frozenset(_held.values())


def moved_to(folder: Path) -> Path | None:
    """Where a folder that this process has made and locked has been moved to; None: it is in its place, or deleted."""
    if folder in _held and not os.path.lexists(folder):
        with contextlib.suppress(OSError):
            lock = os.readlink(f"/proc/self/fd/{_held[folder]}")
            return Path(lock).parent if os.path.exists(lock) else None  # A deleted one has another name there.
    return None


@contextlib.contextmanager
def released(folder: Path | None) -> Iterator[None]:
    """Release the lock of ``create`` at the end of the ``with`` block."""
    try:
        yield
    finally:
        if folder in _held:
            kept_files.close(_held.pop(folder))
