"""What the agents report."""

from __future__ import annotations

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, OneLine, Seconds
from ddplaunch.protocol.launcher_agent import Report


@dataclass(frozen=True)
class CheckpointAge(Report):
    """Agent to launcher: how old the checkpoint is, by the clock of the host; None: there is none.

    Attributes:
        host: display name of the node.
    """

    attempt: Count
    host: OneLine
    age_s: Seconds | None


FROM_AGENT = (CheckpointAge,)
