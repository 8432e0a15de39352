"""Which runs there are, for other features: finds their folders, reads their files, asks the agents of other hosts.

``run_json`` runs in each process, the other modules in that of the command. Only reads. Must not import torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def own_pids() -> Iterator[int]:
    """The processes of this user. Root may read the environment of others, too."""
    from ddplaunch.system import procfs

    for pid in procfs.pids():
        with contextlib.suppress(OSError):  # It has ended.
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
                yield pid
