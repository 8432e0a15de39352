"""What this node tells of its hardware and its clock, where each node has a launcher. Used by the agent.

The coordinator's node tells when, by its clock, this node's NodeJoined had arrived and the RoundFormed was sent. The
first is later than this node's reading of its own clock before the NodeJoined, the second earlier than that after the
RoundFormed: so much is certain of the difference, however long the records were on their way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddplaunch.features.health.differences import certain_offset
from ddplaunch.features.health.records import HardwareOfNode, NodeHardware

if TYPE_CHECKING:
    from ddplaunch.protocol.rendezvous import RoundFormed


class HardwareReport:
    """One node's. ``hardware`` is None if the user wants nothing to be looked at."""

    def __init__(self) -> None:
        self.hardware: NodeHardware | None = None
        self._joined_time_s = 0.0
        self._ahead_s = 0.0

    def on_join(self) -> None:
        """NodeJoined is about to be sent."""
        self._joined_time_s = time.time()

    def on_formed(self, formed: RoundFormed) -> None:
        """The answer to it has arrived."""
        if formed.time_s:
            self._ahead_s = certain_offset(self._joined_time_s - formed.joined_time_s, time.time() - formed.time_s)

    def of(self, attempt: int, host: str) -> HardwareOfNode | None:
        """The record, before the node's first attempt."""
        if self.hardware is None:
            return None
        return HardwareOfNode(attempt=attempt, host=host, hardware=self.hardware, clock_ahead_s=self._ahead_s)
