"""What launchers and agents say to each other where each node has a launcher."""

from __future__ import annotations

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, Seconds, SignalNumber
from ddplaunch.protocol.launcher_agent import Order


@dataclass(frozen=True)
class StopBeforeEnd(Order):
    """The launcher that watches the job to all agents, which stop their workers, and then to each agent's launcher."""

    attempt: Count
    signum: SignalNumber
    grace_s: Seconds


FROM_AGENT = (StopBeforeEnd,)
TO_AGENT = (StopBeforeEnd,)
