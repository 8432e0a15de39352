"""What kind of file a script is."""

from __future__ import annotations

from pathlib import Path


def is_plain(path: str) -> bool:
    """Whether the forkserver can run ``path``; a folder, an archive or a compiled file needs a new interpreter."""
    try:
        return b"\0" not in Path(path).read_bytes()
    except OSError:
        return False
