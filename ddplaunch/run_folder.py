"""The folder of a run: its logs, report.txt and report.json. Private to the user; the newest 20 are kept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KEEP_RUNS = 20
_LOCK = ".ddplaunch-run"


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
    """A new folder ``base/run_id``, with a number behind it if that is taken; locked until this process ends.

    Raises:
        UsageError: ``base`` is there and not a folder.
        OSError: it cannot be made.
    """
    if base.exists() and not base.is_dir():
        raise UsageError(f"--log-dir {base}: is a file", "Give a folder; it is made if it is not there.")
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    for folder in _numbered(base, run_id):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            _lock(folder)
            return folder
    raise FileExistsError(f"{base / run_id} and 9,998 more are there already")


def _numbered(base: Path, name: str) -> Iterator[Path]:
    yield base / name
    yield from (base / f"{name}.{number}" for number in range(2, 10_000))


def share(base: Path, name: str, host: str) -> Path:
    """A new folder ``base/name/host``; on a shared file system the launcher or other nodes may have made ``base/name``.

    Where an earlier run of that name has left one for this host, the name gets a number. Where none can be made, what
    is written there later fails.
    """
    for folder in _numbered(base, name):
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
    fd = os.open(folder / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, how | fcntl.LOCK_NB)


def prune(base: Path) -> None:
    """Delete all but the newest ``KEEP_RUNS`` runs below ``base``; never one that goes on, nor what is not ours."""
    with contextlib.suppress(OSError):
        runs = [entry for entry in base.iterdir() if (entry / _LOCK).is_file() and not entry.is_symlink()]
        for folder in sorted(runs, key=lambda run: (run / _LOCK).stat().st_mtime)[:-KEEP_RUNS]:
            if not _is_in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_in_use(folder: Path) -> bool:
    try:
        with open(folder / _LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
