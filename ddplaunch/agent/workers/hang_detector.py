"""Hang detector: reports to the launcher when all workers of this node become idle, and when one writes output again.

Runs in the agent, main thread only; pump threads post OutputResumed. Must not decide that the job hangs: the launcher
decides, from the reports of all nodes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddplaunch.agent.events import AttemptFailure, OutputResumed
from ddplaunch.protocol import stack_dump
from ddplaunch.protocol.launcher_agent import AbortHungAttempt, ActivityState, WorkerActivity

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.agent.workers.worker_group import WorkerGroup

_NEVER = float("inf")
_SUSPENDED_S = 2.0
"""If a timer fires this much too late, this process was suspended meanwhile."""


class HangDetector:
    """Watches the output of one attempt's workers.

    Attributes:
        is_hung: the launcher has found that the workers of all nodes are idle.
    """

    def __init__(
        self,
        timeout_s: float | None,
        group: WorkerGroup,
        send: Callable[[object], None],
        post: Callable[[object], None],
    ) -> None:
        """Workers without output for ``timeout_s`` seconds are idle; None disables the reports."""
        self.is_hung = False
        self._timeout_s = _NEVER if timeout_s is None else timeout_s
        self._group = group
        self._send, self._post = send, post
        self._start_s = self._deadline = 0.0
        self._reported: ActivityState = "active"

    def watch(self, wait: Callable[[Callable[[], bool], Callable[[], float]], bool], done: Callable[[], bool]) -> None:
        """``wait`` until ``done``. If the job hangs, also collect the workers' Python stacks."""
        self._start_s = time.monotonic()
        self._deadline = self._start_s + self._timeout_s
        while not wait(done, lambda: self._deadline):
            self._check_output()
        if self._timeout_s != _NEVER:
            self._report("finished")
        if self.is_hung:
            self._group.request_stacks()
            end_s = time.monotonic() + stack_dump.DUMP_S
            wait(lambda: self._group.all_ended, lambda: end_s)

    def handle_event(self, event: OutputResumed | AbortHungAttempt) -> AttemptFailure | None:
        """Handle an event; returns the attempt's failure if the job hangs.

        Events of an earlier attempt, and all events after the end of ``watch``, are ignored.
        """
        if event.attempt != self._group.attempt or self._reported == "finished":
            return None
        if isinstance(event, AbortHungAttempt):
            self.is_hung = True
            return AttemptFailure(f"no worker has written anything for {self._timeout_s:g} s: the job hangs")
        self._deadline = time.monotonic() + self._timeout_s
        if self._reported == "idle":
            self._report("active")
        return None

    def _check_output(self) -> None:
        streams = self._group.streams
        for stream in streams:  # Set before the check, so that output which arrives during the check is also posted.
            stream.on_next_output = self._post_resumed
        now = time.monotonic()
        if now - self._deadline > _SUSPENDED_S:  # The whole job was suspended, including its workers.
            self._start_s = now
        self._deadline = max([self._start_s, *(stream.written_s for stream in streams)]) + self._timeout_s
        if self._deadline <= now:
            self._deadline = _NEVER
            self._report("idle")

    def _report(self, state: ActivityState) -> None:
        self._reported = state
        self._send(WorkerActivity(self._group.attempt, state))

    def _post_resumed(self) -> None:
        self._post(OutputResumed(self._group.attempt))
