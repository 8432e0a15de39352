"""Events in the agent's mailbox, besides SignalReceived and records of the launcher, the forkserver and the member.

Threads and signal handlers of the agent post them, its main thread handles them. Must not leave this process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

    Wait = Callable[[Callable[[], bool], float | Callable[[], float]], bool]
    """Handles events until a condition holds (True), or until a deadline, which may change (False)."""


@dataclass(frozen=True)
class LauncherLost:
    """The agent's stdin has ended, or pings are missing: this agent must stop.

    The launcher has closed the stdin, or the launcher, its machine or the network has failed.
    """


@dataclass(frozen=True)
class OutputResumed:
    """An idle worker of ``attempt`` has written output."""

    attempt: int


@dataclass(frozen=True)
class AttemptFailure:
    """Why an attempt failed, if not by a worker's exit.

    Attributes:
        reason: a text for the user, which names the host.
        returncode: returncode of the helper process whose end is the failure; None for another failure.
        hung: the launcher has found that the job hangs.
    """

    reason: str
    returncode: int | None = None
    hung: bool = False
