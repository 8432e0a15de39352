"""Whether a folder can be written to, and how full its disk is: by writing 4 KB into it.

Used by the agent, in a thread: a file system of the network may not answer. Leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os

from ddplaunch.late_dataclass import dataclass

_BYTES = 4096


@dataclass(frozen=True)
class FolderState:
    """What was found out about a folder.

    Attributes:
        error: why nothing can be written; empty if something can.
        used_share: share of its disk that is used, from 0 to 1, as ``df`` shows it; None: not known.
    """

    folder: str
    error: str = ""
    used_share: float | None = None


def probe(folder: str) -> FolderState:
    """Write and delete a small file. Blocks for as long as the file system does."""
    path = os.path.join(folder, f".ddplaunch-probe-{os.getpid()}")
    error = ""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(_BYTES))
        finally:
            os.close(fd)  # Here NFS tells that its server has no space.
    except OSError as failure:
        error = failure.strerror or str(failure)
    with contextlib.suppress(OSError):
        os.unlink(path)
    return FolderState(folder, error, _used_share(folder))


def _used_share(folder: str) -> float | None:
    with contextlib.suppress(OSError):
        disk = os.statvfs(folder)
        used = disk.f_blocks - disk.f_bfree
        if used + disk.f_bavail:
            return used / (used + disk.f_bavail)
    return None
