"""Stops a run some time before its job ends, by the wall clock of the launcher that watches the job.

Runs in the launcher, in the main thread. The scheduler is asked in a thread whether the limit was changed: every
``_ASK_S``, and more often towards the end. Where each node has a launcher, each knows when it is time by its own clock,
and sends the order to all nodes; only that of the launcher that watches the job reaches them, so that all stop by one
clock. A launcher that has got no order for ``_ALONE_S`` stops its own node: no workers run, or that launcher is lost.
"""

from __future__ import annotations

import math
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.features.schedulers.table import job_ends
from ddplaunch.features.time_limit.records import StopBeforeEnd
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted
from ddplaunch.text import duration
from ddplaunch.threads import post_from_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

_ASK_S, _LEAST_ASK_S = 300.0, 5.0
_LOOK_S = 60.0
"""The clock may be set meanwhile."""

_CHANGE_S = 20.0
_AGAIN_S, _ALONE_S = 1.0, 60.0

_RESERVE_S = 15.0
"""Seconds between SIGKILL and the end of the job: for the end of the run, its report, and the requeue."""


class TimeLimitWatch(Watch):
    """Of one launcher."""

    def __init__(self, run: RunServices) -> None:
        config = run.config
        name, self._before_s = config.stop_before_end or ("SIGTERM", 0.0)
        self._run, self._signum = run, signal.Signals[name]
        self._own_end_s = math.inf if config.time_limit_s is None else time.time() + config.time_limit_s
        self._job_ends_s = math.inf if config.job_ends_s is None else config.job_ends_s
        self._told_s = math.inf
        self._attempt: int | None = None
        self._is_asking = self._was_asked_late = False
        # Where each node has a launcher, that of another node asks only before it acts alone.
        self._ask_at = NEVER if config.rendezvous and config.rendezvous.node_index else 0.0

    @property
    def _ends_s(self) -> float:
        return min(self._own_end_s, self._job_ends_s)

    def on_event(self, index: int, event: object) -> None:
        """Attempts of this node, and the decision of the launcher that watches the job."""
        if isinstance(event, AttemptStarted):
            self._attempt = event.attempt
        elif isinstance(event, AttemptEnded):
            self._attempt = None
        elif isinstance(event, StopBeforeEnd) and self._run.config.each_node_has_launcher:
            self._stop(event.grace_s)

    def run_due(self, now: float) -> float:
        """Stop the run if it is time, or ask when the job ends. Returns when to call again."""
        if self._run.shutdown.in_progress:
            return NEVER
        self._tell()
        until_s = self._ends_s - self._before_s - time.time()
        if until_s <= 0.0:
            return self._on_due(now, -until_s)
        if now >= self._ask_at:
            is_first, self._ask_at = not self._ask_at, now + max(_LEAST_ASK_S, min(_ASK_S, until_s / 2))
            if not is_first:  # ``prepare`` has just asked.
                self._ask()
        return min(now + until_s, now + _LOOK_S, self._ask_at)

    def _on_due(self, now: float, late_s: float) -> float:
        if not self._run.config.each_node_has_launcher:
            self._stop(self._grace_s)
            return NEVER
        if late_s < min(_ALONE_S, self._before_s / 2):
            if self._attempt is not None:
                self._run.send_to_all(StopBeforeEnd(self._attempt, self._signum, self._grace_s))
        elif not self._was_asked_late:
            self._was_asked_late = True
            self._ask()
        elif not self._is_asking:
            self._stop(self._grace_s)
        return now + _AGAIN_S

    @property
    def _left_s(self) -> float:
        return max(0.0, self._ends_s - time.time())

    @property
    def _grace_s(self) -> float:
        """All the time that is left but a reserve."""
        return round(max(self._left_s - _RESERVE_S, self._left_s * 0.75), 1)

    def _stop(self, grace_s: float) -> None:
        """No effect if the run is being stopped."""
        why = f"the time limit is {duration(round(self._left_s))} away"
        self._run.shutdown.stop_to_continue(self._signum, grace_s, why)

    # What the scheduler says.

    def _ask(self) -> None:
        if not self._is_asking:
            self._is_asking = True
            ask = lambda: partial(self._on_answer, job_ends(os.environ, anew=True))  # noqa: E731
            post_from_thread("time limit", ask, self._run.post, partial(self._on_answer, ()))

    def _on_answer(self, ends: Sequence[float | None]) -> None:
        """Without an answer, the last one holds."""
        self._is_asking = False
        known = [end for end in ends if end is not None]
        if known and min(known) != self._job_ends_s:
            self._job_ends_s, self._was_asked_late = min(known), False

    def _tell(self) -> None:
        """Tell the user when the job ends, at the start and after a change."""
        ends_s, before = self._ends_s, self._told_s
        if ends_s == before or abs(ends_s - before) < _CHANGE_S:
            return
        self._told_s = ends_s
        away = f"{duration(max(0.0, ends_s - time.time()))} away" if ends_s < math.inf else "gone"
        is_change = "" if before == math.inf else " now"
        what = f"the workers get {self._signum.name} {duration(self._before_s)} before it"
        facts = {"end_t": round(ends_s, 3)} if ends_s < math.inf else {}
        self._run.messages.show(f"the time limit is{is_change} {away}; {what}", Level.NORMAL, "time_limit", **facts)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (TimeLimitWatch(run),)
