"""Files for the user alone, whatever the umask is. Used by every process; imports nothing but ``os``."""

from __future__ import annotations

import os


def opener(path: str, flags: int) -> int:
    """For ``open``: a file that is created has mode 0600."""
    return os.open(path, flags, 0o600)
