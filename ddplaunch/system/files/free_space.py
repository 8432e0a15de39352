"""Keeps a little space free on a disk, for the run's report, which is written last.

Used by the launcher, for files in the run folder that may become large.
"""

from __future__ import annotations

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
    disk = os.statvfs(where)
    if disk.f_bavail * disk.f_frsize < nbytes + _KEPT_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
