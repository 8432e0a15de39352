"""What says that a folder is a snapshot; and what agents say of theirs where each node has a launcher."""

from __future__ import annotations

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, OneLine
from ddplaunch.protocol.launcher_agent import Report

HOME_BASE = "~/.local/state/ddplaunch"
"""Where hosts of ``--sync`` keep copies and the working directory; each has a home of its own."""

MARKER = ".ddplaunch-snapshot.json"
"""File in a snapshot with its facts, ``copies.Facts``; a folder without it is no snapshot."""

DIFF = ".ddplaunch-snapshot.diff"
"""File in a snapshot with what differs from the commit."""


@dataclass(frozen=True)
class SnapshotUsed(Report):
    """Agent to launcher: the hash of the content of the snapshot that the workers on ``host`` run."""

    attempt: Count
    host: OneLine
    content: OneLine


FROM_AGENT = (SnapshotUsed,)
