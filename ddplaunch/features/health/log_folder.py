"""The folder of the logs: whether it can be written to, and how full its disk is, found out by writing 4 KB into it.

Used by the agent, in a thread: a file system of the network may not answer. Leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.results import HealthFinding
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote

LIMIT_S = 2.0
"""For an answer of the file system."""

FULL_SHARE = 0.95
_BYTES = 4096
_MAX_PATH = 200


@dataclass(frozen=True)
class FolderState:
    """What was found out about a folder.

    Attributes:
        error: why nothing can be written; empty if something can.
        used_share: share of its disk that is used, from 0 to 1, as ``df`` shows it; None: not known.
    """

    folder: str
    error: str = ""
    used_share: float | None = None


def probe(folder: str) -> FolderState:
    """Write and delete a small file. Blocks for as long as the file system does."""
    path = os.path.join(folder, f".ddplaunch-probe-{os.getpid()}")
    error = ""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(_BYTES))
        finally:
            os.close(fd)  # Here NFS tells that its server has no space.
    except OSError as failure:
        error = failure.strerror or str(failure)
    with contextlib.suppress(OSError):
        os.unlink(path)
    return FolderState(folder, error, kept_files.used_share(folder))


def findings(state: FolderState) -> tuple[HealthFinding, ...]:
    """The findings about the folder of the logs."""
    folder = quote(state.folder, _MAX_PATH)
    if state.error:
        text = f"nothing can be written to {folder}: {quote(state.error)}"
        return (HealthFinding(rule="folder-not-writable", text=text, action="another --log-dir", severity="refuse"),)
    if state.used_share is not None and state.used_share >= FULL_SHARE:
        text = f"the disk of {folder} is {state.used_share:.0%} full"
        return (HealthFinding(rule="disk-full", text=text, action="delete files, or choose another --log-dir"),)
    return ()


def silent(folder: str, limit_s: float) -> HealthFinding:
    """Writing to the folder has not ended in ``limit_s`` seconds."""
    text = f"writing 4 KB to {quote(folder, _MAX_PATH)} takes more than {limit_s:g} s"
    action = "look at its file system, or choose another --log-dir"
    return HealthFinding(rule="folder-silent", text=text, action=action, severity="refuse")
