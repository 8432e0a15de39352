"""The folder of a run: its logs, report.txt and report.json. Private to the user; the newest 20 are kept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KEEP_RUNS = 20
_LOCK = ".ddplaunch-run"
_AT_ONCE_S = 60.0
_LONG_S = 30 * 24 * 3600.0

_held: dict[Path, int] = {}
"""Descriptors of the locks of this process."""


def new_run_id() -> str:
    """A name that sorts by time and that no other run has: ``20261120-193012-a1b2c3``."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"


def default_base(environ: Mapping[str, str]) -> Path:
    """``$XDG_STATE_HOME/ddplaunch``, or below ``~/.local/state`` (XDG Base Directory Specification).

    A user without a home, in a container with a made-up user id, gets a fresh folder for temporary files.
    """
    state = environ.get("XDG_STATE_HOME", "")
    try:
        base = Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()
    except RuntimeError:
        import tempfile

        return Path(tempfile.mkdtemp(prefix="ddplaunch-"))
    return base / "ddplaunch"


def create(base: Path, run_id: str) -> Path:
    """A new folder ``base/run_id``, with more behind it if that is taken; locked until ``released`` ends.

    Raises:
        UsageError: ``base`` is there and not a folder.
        OSError: it cannot be made.
    """
    if base.exists() and not base.is_dir():
        raise UsageError(f"--log-dir {base}: is a file", "Give a folder; it is made if it is not there.")
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    for folder in _free(base, run_id):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            _lock(folder)
            return folder
    raise FileExistsError(f"{base / run_id} and many more are there already")


def _free(base: Path, name: str) -> Iterator[Path]:
    """Numbers at first; hundreds of launchers that start at once must not all try the same ones."""
    yield base / name
    yield from (base / f"{name}.{number}" for number in range(2, 10))
    yield from (base / f"{name}.{os.urandom(3).hex()}" for _ in range(100))


def share(base: Path, name: str, host: str) -> Path:
    """A new folder ``base/name/host``; on a shared file system the launcher or other nodes may have made ``base/name``.

    Where an earlier run of that name has left one for this host, the name gets more behind it. Where none can be made,
    what is written there later fails.
    """
    for folder in _free(base, name):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / host).mkdir(mode=0o700)
        except FileExistsError:
            continue
        except OSError:
            break
        with contextlib.suppress(OSError):  # The launcher has it, on a shared file system.
            _lock(folder, fcntl.LOCK_SH)
        return folder / host
    return base / name / host


def _lock(folder: Path, how: int = fcntl.LOCK_EX) -> None:
    """Held by the open descriptor, so that it goes when this process does, however it does."""
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.write(fd, f"{os.uname().nodename}\n".encode())
    _held.setdefault(folder, fd)
    with contextlib.suppress(OSError):  # There are file systems without locks.
        fcntl.flock(fd, how | fcntl.LOCK_NB)


@contextlib.contextmanager
def released(folder: Path | None) -> Iterator[None]:
    """Give the lock of ``create`` up at the end."""
    try:
        yield
    finally:
        if folder in _held:
            os.close(_held.pop(folder))


def prune(base: Path) -> None:
    """Delete all but the newest ``KEEP_RUNS`` runs below ``base``; never one that goes on, nor what is not ours."""
    with contextlib.suppress(OSError):
        folders = [entry for entry in base.iterdir() if (entry / _LOCK).is_file() and not entry.is_symlink()]
        for run in _runs(folders)[:-KEEP_RUNS]:
            for folder in run:
                if not _is_in_use(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _runs(folders: list[Path]) -> list[list[Path]]:
    """The oldest first. A launcher per node or per worker makes many folders of one name at about the same time."""
    runs: list[list[Path]] = []
    last: dict[str, tuple[float, list[Path]]] = {}
    for made_s, folder in sorted(((folder / _LOCK).stat().st_mtime, folder) for folder in folders):
        name = re.sub(r"\.([0-9]{1,4}|[0-9a-f]{6})$", "", folder.name)
        before_s, run = last.get(name, (0.0, []))
        if not run or made_s - before_s > _AT_ONCE_S:
            run = []
            runs.append(run)
        run.append(folder)
        last[name] = (made_s, run)
    return runs


def _is_in_use(folder: Path) -> bool:
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)  # What is locked over NFS must be open for writing.
    except OSError:
        return True
    with os.fdopen(fd, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return _may_go_on(folder)
        # On some file systems a lock is known on its own machine only.
        return not set(lock.read().split()) <= {os.uname().nodename.encode()} and _may_go_on(folder)


def _may_go_on(folder: Path) -> bool:
    """Of a run whose lock tells nothing."""
    is_young = time.time() - (folder / _LOCK).stat().st_mtime < _LONG_S
    return is_young and not (folder / "report.json").exists()
