"""How ddplaunch writes and reads files beside a job: whole or not at all, without blocking, for the user alone.

Used by every process; imports only what Python has loaded at its start. A disk may be full, read-only or gone at any
moment, and even ``close`` reports it: no such failure may change the outcome of a run. What the launcher could not
write is noted here, and told once at the end of the run. ``pathlib`` raises where ``os.path`` answers: a file is looked
for by ``os.path.exists``, ``isfile`` or ``isdir``.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path


_MAX_NOTES = 1000
_MAX_NAMES = 3

_notes: dict[str, str] = {}
"""Why a file could not be written, by its path; any thread."""


class NotRegular(OSError):
    """A folder, a FIFO or a device, where a file is read."""


# Reading and writing.


@contextlib.contextmanager
def open_regular(path: str | Path, flags: int = 0) -> Iterator[BinaryIO]:
    """The file, open for reading; a failure of its close is ignored. ``flags`` are further ones of ``os.open``.

    Raises:
        NotRegular, OSError: as ``regular_fd``.
    """
    fd = regular_fd(path, flags)
    try:
        yield os.fdopen(fd, "rb", closefd=False)
    finally:
        close(fd)


def regular_fd(path: str | Path, flags: int = 0) -> int:
    """The descriptor of a file that is read; for files that stay open.

    Raises:
        NotRegular: it is no regular file.
        OSError: it cannot be read.
    """
    # O_NONBLOCK: opening a FIFO without a writer would block.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotRegular(errno.EINVAL, "is not a regular file")
    except OSError:
        close(fd)
        raise
    return fd


def write_whole(
    path: str | Path,
    data: str | bytes | Iterable[str],
    mode: int = 0o600,
    may_replace: Callable[[], bool] = lambda: True,
) -> bool:
    """Write the whole file or none: a reader never sees a part. Returns ``may_replace()``, asked before the last step.

    Of a large file, ``data`` may be its texts in order, so that it is never in memory as a whole.

    Raises:
        OSError: it cannot be written.
    """
    part = ""
    try:
        fd, part = new_part(path, mode)
        with open(fd, "wb") as file:
            for text in (data,) if isinstance(data, (str, bytes)) else data:
                file.write(text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace"))
        if is_wanted := may_replace():
            os.replace(part, path)
            part = ""
        return is_wanted
    finally:
        if part:
            with contextlib.suppress(OSError):
                os.unlink(part)


def check_can_write(option: str, path: str) -> None:
    """Raise OptionError, about this option, if ``write_whole`` cannot write the file, as far as that can be known."""
    from ddplaunch.errors import OptionError

    if os.path.lexists(path) and not os.path.isfile(path):
        raise OptionError(option, path, "is no regular file")  # A rename would replace it.
    try:
        fd, part = new_part(path)
        os.close(fd)
        os.unlink(part)
    except OSError as error:
        hint = "Its folder must exist, and you must be able to write to it."
        raise OptionError(option, path, error.strerror or "cannot be written", hint) from None


def new_part(path: str | Path, mode: int = 0o600) -> tuple[int, str]:
    """Create a file beside ``path``, for what is not complete: its descriptor, and its path.

    The name is hidden and not to be guessed: others may write in the folder.

    Raises:
        OSError: it cannot be created.
    """
    folder, name = os.path.split(path)
    part = os.path.join(folder, f".{name}.{_thread.get_native_id()}.{os.urandom(4).hex()}.part")
    return os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode), part


def open_to_append(path: str | Path, access: int = os.O_WRONLY, dir_fd: int | None = None) -> int:
    """The descriptor of a file that is appended to, and created if it is missing; a link is not followed.

    Raises:
        OSError: it cannot be opened.
    """
    flags = access | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600, dir_fd=dir_fd)


def close(fd: int) -> None:
    """Close a descriptor. A file system that has died reports it here, too, and the descriptor is free all the same."""
    with contextlib.suppress(OSError):
        os.close(fd)


def private(path: str, flags: int) -> int:
    """For ``open``, as its opener: a file that is created has mode 0600, whatever the umask is."""
    return os.open(path, flags, 0o600)


# What could not be written.


@contextlib.contextmanager
def noting(path: Path) -> Iterator[None]:
    """Note why the file cannot be written, in place of an OSError; one that is written later is no longer noted."""
    try:
        yield
    except OSError as error:
        note(path, error)
    else:
        _notes.pop(str(path), None)


def note(path: str | Path, error: Exception) -> None:
    """Note why the file could not be written."""
    if len(_notes) < _MAX_NOTES:
        _notes[str(path)] = getattr(error, "strerror", None) or str(error)


def note_fd(fd: int, error: Exception) -> None:
    """As ``note``, for an open file, which may have been moved."""
    with contextlib.suppress(OSError):
        note(os.readlink(f"/proc/self/fd/{fd}"), error)


def is_noted(path: Path) -> bool:
    """Whether it is noted that the file could not be written."""
    return str(path) in _notes


def not_written(folder: Path) -> str:
    """One sentence on what could not be written below ``folder``; empty if there is nothing. The notes are dropped."""
    paths = [path for path in tuple(_notes) if path.startswith(f"{folder}/")]
    by_reason: dict[str, list[str]] = {}
    for path in paths:
        by_reason.setdefault(_notes.pop(path), []).append(os.path.relpath(path, folder))
    parts = [f"{_listed(names)}: {reason}" for reason, names in by_reason.items()]
    return f"not written, or only in part, in {folder}: {'; '.join(parts)}" if parts else ""


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


# Room on a disk: a little is kept free for the run's report, which is written last.


_KEPT_FREE_BYTES = 1 << 20


def keep_free(where: int | Path, nbytes: int) -> None:
    """Raise OSError (ENOSPC) if ``nbytes`` more would leave too little space on a disk.

    ``where``: the descriptor of an open file on it, or a folder.
    """
    disk = os.statvfs(where)
    if disk.f_bavail * disk.f_frsize < nbytes + _KEPT_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
