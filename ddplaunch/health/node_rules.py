"""What is wrong with a node apart from its GPUs: its folder for logs, the disk of that folder.

Used by the agent. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.protocol.health import HealthFinding
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.system.files.folder_probe import FolderState

FULL_SHARE = 0.95
_MAX_PATH = 200


def of_folder(state: FolderState) -> tuple[HealthFinding, ...]:
    """The findings about the folder of the logs."""
    folder = quote(state.folder, _MAX_PATH)
    if state.error:
        text = f"nothing can be written to {folder}: {quote(state.error)}"
        return (HealthFinding(rule="folder-not-writable", text=text, action="another --log-dir", severity="refuse"),)
    if state.used_share is not None and state.used_share >= FULL_SHARE:
        text = f"the disk of {folder} is {state.used_share:.0%} full"
        return (HealthFinding(rule="disk-full", text=text, action="delete files, or choose another --log-dir"),)
    return ()


def of_silent_folder(folder: str, limit_s: float) -> HealthFinding:
    """Writing to the folder has not ended in ``limit_s`` seconds."""
    text = f"writing 4 KB to {quote(folder, _MAX_PATH)} takes more than {limit_s:g} s"
    action = "look at its file system, or choose another --log-dir"
    return HealthFinding(rule="folder-silent", text=text, action=action, severity="refuse")
