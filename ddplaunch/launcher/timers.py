"""The timers of the launcher's loop: runs the parts of a run that are due, and computes the next deadline.

Runs in the launcher, in the main thread. No part uses another kind of timer; only the pings are sent by a thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.mailbox import Mailbox

_FROZEN_S = 1.0
"""Delay of a deadline that shows that this process or its machine was suspended."""

_CATCH_UP_S = 5.0


class Timed(Protocol):
    """A part of a run with a deadline."""

    def run_due(self, now: float) -> float:
        """Do what is due at ``now`` (``time.monotonic()``). Returns when to call again at the latest, or infinity."""


class Timers:
    """Runs the parts of a run that are due, also under an uninterrupted stream of events.

    After a suspension (SIGSTOP, Ctrl-Z, a suspended laptop), deadlines have passed although the events before them may
    wait in the mailbox. The launcher handles these events first, for up to ``_CATCH_UP_S``; the pings go on
    meanwhile, in their own thread.
    """

    def __init__(self, pings: Timed, parts: Sequence[Timed], mailbox: Mailbox[object]) -> None:
        """``parts`` run in this order, after the pings, which may suspend this process."""
        self._pings = pings
        self._parts = parts
        self._mailbox = mailbox
        self._deadline = float("inf")
        self._catch_up_by = 0.0

    def run_due(self) -> float:
        """Run the parts that are due. Returns the time until which the loop may wait for an event."""
        ping_at = self._pings.run_due(time.monotonic())
        now = time.monotonic()
        if now - self._deadline > _FROZEN_S:
            self._catch_up_by = self._deadline = now + _CATCH_UP_S
        if now < self._catch_up_by and not self._mailbox.is_empty:
            return now
        self._deadline = min(ping_at, *(part.run_due(now) for part in self._parts))
        return self._deadline
