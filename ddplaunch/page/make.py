"""Writes run.html into a run folder, whole or not at all.

Runs in a child process of the launcher, and in the user's process for ``--page`` and ``--serve``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.page.render import page

if TYPE_CHECKING:
    from pathlib import Path

FILE = "run.html"


def make(folder: Path) -> Path:
    """Make the page of a run folder. Returns its path.

    Raises:
        OSError: it cannot be written.
    """
    text, part = page(folder), folder / f".{FILE}.{os.getpid()}"
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode("utf-8", "replace"))
        os.replace(part, folder / FILE)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return folder / FILE
