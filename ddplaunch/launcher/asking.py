"""Agents that are asked something in place of running a job: each answers by its deadline, or is a failure."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddplaunch.launcher.failures import HostFailure
from ddplaunch.launcher.handles import AgentConnected, AgentLost, Handle
from ddplaunch.records import AgentFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ANSWER_S = 30.0
"""For one answer: a slow look-up in the DNS, or all tries to reach a node, take less."""


@dataclass
class Asked:
    """One that is asked. ``deadline``: for its next answer; while it is connected to, its handle knows better."""

    name: str
    handle: Handle
    failure: HostFailure | None = None
    deadline: float = float("inf")

    def hear(self, event: object) -> None:
        """Take what any agent may say instead of an answer."""
        match event:
            case AgentConnected():
                self.deadline = time.monotonic() + ANSWER_S
            case HostFailure():
                self.failure = event
            case AgentFailed(message=message, hint=hint):
                self.failure = HostFailure(self.name, "start", message, hint)
            case AgentLost():
                self.failure = self.failure or HostFailure(self.name, "start", "the connection has ended")


def wait(waited_for: Callable[[], Sequence[Asked]], take_next: Callable[[float], bool]) -> None:
    """Until nobody is waited for. ``take_next`` takes one event, or returns False at a ``time.monotonic()``."""
    while late := waited_for():
        if take_next(min(asked.deadline for asked in late)):
            continue
        for asked in late:
            if time.monotonic() >= asked.deadline:
                asked.failure = HostFailure(asked.name, "timeout", "did not answer in time")


def close(everyone: Sequence[Asked]) -> None:
    """End all agents."""
    for asked in everyone:
        asked.handle.end_input()
    for asked in everyone:
        asked.handle.close()
