"""The folder of the logs: whether it can be written to, and how full its disk is, found out by writing 4 KB into it.

Used by the agent, in a thread: a file system of the network may not answer. Leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ddplaunch.features import mounts
from ddplaunch.protocol.results import HealthFinding
from ddplaunch.system.files import run_folder
from ddplaunch.text import quote

LIMIT_S = 2.0
"""For an answer of the file system."""

FULL_SHARE = 0.95
_BYTES = 4096
_MAX_PATH = 200


def look(folder: str) -> tuple[HealthFinding, ...]:
    """What is wrong with the folder. Writes and deletes a small file; blocks for as long as the file system does.

    Creates a folder that is missing: the agent could not, and this time the reason is told.
    """
    shown = quote(folder, _MAX_PATH)
    if error := _error_of_writing(os.path.join(folder, f".ddplaunch-probe-{os.getpid()}")):
        text = f"nothing can be written to {shown}: {quote(error)}"
        return (HealthFinding(rule="folder-not-writable", text=text, action="another --log-dir", severity="refuse"),)
    used_share = mounts.used_share(folder)
    if used_share is not None and used_share >= FULL_SHARE:
        text = f"the disk of {shown} is {used_share:.0%} full"
        return (HealthFinding(rule="disk-full", text=text, action="delete files, or choose another --log-dir"),)
    return ()


def _error_of_writing(path: str) -> str:
    """Why nothing can be written there; empty if something can."""
    try:
        run_folder.make_private(Path(path).parent)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(_BYTES))
        finally:
            os.close(fd)  # Here NFS tells that its server has no space.
    except OSError as failure:
        return failure.strerror or str(failure)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return ""


def silent(folder: str) -> HealthFinding:
    """Writing to the folder has not ended in ``LIMIT_S``."""
    text = f"writing 4 KB to {quote(folder, _MAX_PATH)} takes more than {LIMIT_S:g} s"
    action = "look at its file system, or choose another --log-dir"
    return HealthFinding(rule="folder-silent", text=text, action=action, severity="refuse")
