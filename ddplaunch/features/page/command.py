"""``--page``: makes the page of a run anew, from its run folder on this machine.

Runs in the process that the user started. Works for runs that go on, have ended or were killed, and for those of older
versions: the page says what is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.errors import NODE_NOT_READY, LaunchError
from ddplaunch.system.files import run_folders

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.launcher.request import Request


def page(request: Request) -> None:
    """Make the page of a run, and print its path. Of several launchers it shows all that have a folder here.

    The run id may also be the beginning of one, or ``last``; ``RUN_ID/NAME`` is the folder of one launcher.

    Raises:
        UsageError: there is no such run in the default folder and in --log-dir, or there are several.
        LaunchError: the page cannot be written.
    """
    from ddplaunch.features.page.make import make

    folder = _folder(request.value, request.log_dir)
    try:
        request.show(str(make(folder)))
    except OSError as error:
        raise LaunchError(f"--page: {folder}: {error.strerror}", "", NODE_NOT_READY) from None


def _folder(run_id: str, log_dir: str | None) -> Path:
    run = run_folders.find("--page", run_id, log_dir)
    return run.name if "/" in run_id else run_folders.run_of(run.name)
