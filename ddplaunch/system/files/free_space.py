"""Keeps a little space free on a disk, for the run's report, which is written last.

Used by the launcher, for files in the run folder that may become large.
"""

from __future__ import annotations

import errno
import os

_KEPT_FREE_BYTES = 1 << 20


def keep_free(fd: int, nbytes: int) -> None:
    """Raise OSError (ENOSPC) if ``nbytes`` more in the open file ``fd`` would leave too little space on its disk."""
    disk = os.fstatvfs(fd)
    if disk.f_bavail * disk.f_frsize < nbytes + _KEPT_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
