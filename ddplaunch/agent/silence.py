"""When all workers of this node are silent: the launcher, which hears it of every node, knows when the job hangs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ddplaunch import stacks
from ddplaunch.agent.events import WorkersHeard
from ddplaunch.hang import EndHung, WorkersAre, WorkersState

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.agent.worker_group import WorkerGroup

_NEVER = float("inf")
_LATE_S = 2.0


class Silence:
    """Watches one attempt's workers and tells when they fall silent, and when one is heard again. Main thread only.

    Attributes:
        is_hung: the launcher has said that all nodes are silent.
    """

    def __init__(
        self,
        limit_s: float | None,
        group: WorkerGroup,
        send: Callable[[object], None],
        post: Callable[[object], None],
    ) -> None:
        """Nothing is told where ``limit_s`` is None."""
        self.is_hung = False
        self._limit_s = _NEVER if limit_s is None else limit_s
        self._group = group
        self._send, self._post = send, post
        self._begun_s = self._deadline = 0.0
        self._told: WorkersState = "heard"

    def watch(self, wait: Callable[[Callable[[], bool], Callable[[], float]], bool], done: Callable[[], bool]) -> None:
        """``wait`` until ``done``; if that is because the job hangs, its workers have then told where they are."""
        self._begun_s = time.monotonic()
        self._deadline = self._begun_s + self._limit_s
        while not wait(done, lambda: self._deadline):
            self._look()
        if self._limit_s != _NEVER:
            self._tell("gone")
        if self.is_hung:
            self._group.write_stacks()
            end_s = time.monotonic() + stacks.DUMP_S
            wait(lambda: self._group.all_ended, lambda: end_s)

    def hear(self, event: WorkersHeard | EndHung) -> str:
        """What is to be said if the job hangs. What comes when the workers are gone comes too late."""
        if event.attempt != self._group.attempt or self._told == "gone":
            return ""
        if isinstance(event, EndHung):
            self.is_hung = True
            return f"no worker has written anything for {self._limit_s:g} s: the job hangs"
        self._deadline = time.monotonic() + self._limit_s
        if self._told == "silent":
            self._tell("heard")
        return ""

    def _look(self) -> None:
        streams = self._group.streams
        for stream in streams:  # First, or a write between this and the next line would go unheard.
            stream.wake = self._wake
        now = time.monotonic()
        if now - self._deadline > _LATE_S:  # This process was stopped, and so were its workers: a suspended job.
            self._begun_s = now
        self._deadline = max([self._begun_s, *(stream.written_s for stream in streams)]) + self._limit_s
        if self._deadline <= now:
            self._deadline = _NEVER
            self._tell("silent")

    def _tell(self, state: WorkersState) -> None:
        self._told = state
        self._send(WorkersAre(self._group.attempt, state))

    def _wake(self) -> None:
        self._post(WorkersHeard(self._group.attempt))
