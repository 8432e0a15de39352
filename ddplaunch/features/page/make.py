"""Writes run.html into a run folder, whole or not at all.

Runs in a child process of the launcher, and in the user's process for ``--page`` and ``--serve``.
"""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING

from ddplaunch.features.page.render import page
from ddplaunch.system.files import kept_files, run_folder, run_json

if TYPE_CHECKING:
    from pathlib import Path

FILE = "run.html"


def make(folder: Path) -> Path:
    """Make the page of the run in this folder: of one launcher, or of all where every node has one. Returns its path.

    Raises:
        OSError: it cannot be written.
    """
    kept_files.write_whole(folder / FILE, page(folder).encode("utf-8", "replace"))
    return folder / FILE


def whole_run(folder: Path) -> Path | None:
    """The folder of the whole run, if it is for the launcher of ``folder`` to make its page; otherwise None.

    While the run goes on, that is the first launcher without a report; at the end, the one that finds no other at work:
    the last to write its report always does.
    """
    whole = folder.parent
    if not os.path.isfile(whole / run_folder.NODES):
        return None
    at_work = [each for each in run_folder.of_launchers(whole) if not os.path.exists(each / run_json.REPORT)]
    if folder in at_work:
        return whole if folder == at_work[0] else None
    return None if any(map(run_folder.is_locked, at_work)) else whole
