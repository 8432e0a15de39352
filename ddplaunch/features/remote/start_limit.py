"""Until when an agent must have started on another machine. Runs in the launcher.

The time for what a node is sent before, ddplaunch itself or uv, does not count: on a slow link it takes as long as it
takes, and the limit begins anew with each piece that the link has taken or the node has received.
"""

from __future__ import annotations

import time

_MOST_S = 3600.0
"""A node that pretends to receive is not waited for any longer."""


class StartLimit:
    """The limit for one agent. Any thread.

    Attributes:
        due: when it ends, by ``time.monotonic()``.
    """

    def __init__(self, seconds: float) -> None:
        """It begins now."""
        now = time.monotonic()
        self._seconds, self._last, self.due = seconds, now + _MOST_S, now + seconds

    def restart(self) -> None:
        """The node has got something."""
        self.due = max(self.due, min(time.monotonic() + self._seconds, self._last))
