"""What the agent of rank 0's node tells the launcher of the newest checkpoint."""

from __future__ import annotations

import os

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, LongText, OneLine, Seconds, Size
from ddplaunch.protocol.launcher_agent import Report


@dataclass(frozen=True)
class CheckpointSeen(Report):
    """Agent of the node with rank 0 to the launcher: another checkpoint is the newest; and at the end of each attempt.

    Attributes:
        path: of the checkpoint; empty: there is none.
        saved_t: when it was complete, in seconds since 1970, by the clock of its file system.
        step: number of the training step; 0: it is not known.
        lost_s: at the end of an attempt: seconds of its work that are not saved; below 0 while it runs.
    """

    attempt: Count
    host: OneLine
    path: LongText
    saved_t: Seconds
    step: Size = 0
    lost_s: Seconds = -1.0

    @property
    def name(self) -> str:
        """The checkpoint for the user, as ``step 4,200 (checkpoint-4200)``."""
        return name_of(self.path, self.step)


def name_of(path: str, step: int) -> str:
    """A checkpoint for the user."""
    name = os.path.basename(path.rstrip("/"))
    return f"step {step:,} ({name})" if step else name


FROM_AGENT = (CheckpointSeen,)
