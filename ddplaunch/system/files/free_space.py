"""Keeps a little space free on a disk, for the run's report, which is written last.

Used by the launcher, for files in the run folder that may become large, and by commands that read them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_KEPT_FREE_BYTES = 1 << 20


def keep_free(where: int | Path, nbytes: int) -> None:
    """Raise OSError (ENOSPC) if ``nbytes`` more would leave too little space on a disk.

    ``where``: the descriptor of an open file on it, or a folder.
    """
    if _is_less(os.statvfs(where), nbytes + _KEPT_FREE_BYTES):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_low(path: str | Path) -> bool:
    """Whether ``keep_free`` refuses what is to be written on the disk of ``path``. Does not raise."""
    with contextlib.suppress(OSError):
        return _is_less(os.statvfs(path), _KEPT_FREE_BYTES)
    return False


def _is_less(disk: os.statvfs_result, nbytes: int) -> bool:
    return disk.f_bavail * disk.f_frsize < nbytes
