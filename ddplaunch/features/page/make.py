"""Writes run.html into a run folder, whole or not at all.

``page`` does it for ``--page``, in the user's process, ``main`` in a child process of the launcher. Nothing is loaded
that renders pages before it is needed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError
from ddplaunch.features.runs import run_folders, run_json
from ddplaunch.system.files import kept_files, run_folder

if TYPE_CHECKING:
    from ddplaunch.cli.commands import Request

FILE = "run.html"

LIMIT_S = 600
"""Seconds after which the child process ends by itself: on a file system that hangs, nobody waits for it. A page
of 4,096 ranks takes 8 s, and much longer where others use the CPUs."""

IDLE_S = 600
"""Seconds in which it must be told to begin: a program that has called ``launch`` may go on after an error."""


def make(folder: Path) -> Path:
    """Make the page of the run in this folder: of one launcher, or of all where every node has one. Returns its path.

    Raises:
        OSError: it cannot be written.
    """
    from ddplaunch.features.page.render import page

    kept_files.write_whole(folder / FILE, page(folder).encode("utf-8", "replace"))
    return folder / FILE


def whole_run(folder: Path) -> Path | None:
    """The folder of the whole run, if it is for the launcher of ``folder`` to make its page; otherwise None.

    While the run goes on, that is the first launcher without a report; at the end, the one that finds no other at work:
    the last to write its report always does.
    """
    whole = folder.parent
    if not run_json.has_launchers(whole):
        return None
    at_work = [each for each in run_json.of_launchers(whole) if not os.path.exists(each / run_folder.REPORT)]
    if folder in at_work:
        return whole if folder == at_work[0] else None
    return None if any(map(run_json.is_locked, at_work)) else whole


# For --page: also of runs that go on or were killed, and of those of older versions. The page says what is missing.


def page(request: Request) -> None:
    """Make the page of a run, and print its path. Of several launchers it shows all that have a folder here.

    The run id may also be the beginning of one, or ``last``; ``RUN_ID/NAME`` is the folder of one launcher.

    Raises:
        UsageError: there is no such run in the default folder and in --log-dir, or there are several.
        LaunchError: the page cannot be written.
    """
    folder = _folder(request.value, request.log_dir)
    try:
        request.show(str(make(folder)))
    except OSError as error:
        raise LaunchError(f"--page: {folder}: {error.strerror}", "", NODE_NOT_READY) from None


def _folder(run_id: str, log_dir: str | None) -> Path:
    run = run_folders.find("--page", run_id, log_dir)
    return run.name if "/" in run_id else run_folders.run_of(run.name)


# In a child process of the launcher.


def main() -> None:
    """Make the page of the run folder that is the argument, when a byte comes on stdin; load the modules before.

    Where each node has a launcher, each makes the page of its node, and one of them that of the whole run, too. An
    error of the disk ends with 1. At the end of stdin the launcher has gone: nothing is made.
    """
    os.nice(19)
    from ddplaunch.features.page import render  # noqa: F401 - loaded ahead.

    signal.alarm(IDLE_S)
    if not os.read(0, 1):
        return
    signal.alarm(LIMIT_S)
    folder = Path(sys.argv[1])
    try:
        make(folder)
        if whole := whole_run(folder):
            make(whole)
    except OSError as error:
        sys.exit(f"{error}")
