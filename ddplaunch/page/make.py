"""Writes run.html into a run folder, whole or not at all.

Runs in a child process of the launcher, and in the user's process for ``--page`` and ``--serve``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.page.render import page
from ddplaunch.system.files import run_folder, run_json

if TYPE_CHECKING:
    from pathlib import Path

FILE = "run.html"


def make(folder: Path) -> Path:
    """Make the page of the run in this folder: of one launcher, or of all where every node has one. Returns its path.

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


def whole_run(folder: Path) -> Path | None:
    """The folder of the whole run, if it is for the launcher of ``folder`` to make its page; otherwise None.

    While the run goes on, that is the first launcher without a report; at the end, the one that finds no other at work:
    the last to write its report always does.
    """
    whole = folder.parent
    if not (whole / run_folder.NODES).is_file():
        return None
    at_work = [each for each in run_folder.of_launchers(whole) if not (each / run_json.REPORT).exists()]
    if folder in at_work:
        return whole if folder == at_work[0] else None
    return None if any(map(run_folder.is_locked, at_work)) else whole
