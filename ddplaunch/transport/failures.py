"""Failures of hosts that cannot be reached or cannot run the job, and the table that lists them.

Used by the launcher and by the commands that query hosts. Pure: no I/O, no state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ddplaunch.cluster.hosts import fold
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable

Cause = Literal[
    "configuration",
    "name",
    "TCP",
    "timeout",
    "protocol",
    "host key",
    "authentication",
    "jump",
    "start",
    "setup",
    "python",
    "ddplaunch",
    "torch",
    "directory",
    "script",
    "agent",
]

UNREACHABLE: tuple[Cause, ...] = ("TCP", "timeout")
"""The host is down, hangs or is cut off; other causes are settings and software, which the user changes."""


@dataclass(frozen=True)
class HostFailure:
    """A host that cannot take part.

    Attributes:
        message: the event, without the host's name: hosts with equal messages share a line of the table.
        hint: a remedy for the user; may be empty.
    """

    host: str
    cause: Cause
    message: str
    hint: str = ""


class ConnectFailed(Exception):
    """A connection to a host failed; becomes a HostFailure.

    Attributes:
        max_attempts: number of attempts in all; 1: another attempt cannot succeed, or would get this machine banned.
        is_overload: the server closed the connection before the login, probably because of too many logins.
    """

    def __init__(
        self, cause: Cause, message: str, hint: str = "", *, max_attempts: int = 1, is_overload: bool = False
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message
        self.hint = hint
        self.max_attempts = max_attempts
        self.is_overload = is_overload


def failures_table(failures: Iterable[HostFailure]) -> str:
    """One line per failure with the hosts that it applies to, the most frequent first; then the hints."""
    found = list(failures)
    failed = grouped(((failure.cause, failure.message), failure.host) for failure in found)
    hints = dict.fromkeys(failure.hint for failure in found if failure.hint)
    ordered = sorted(failed.items(), key=lambda item: -len(item[1]))
    lines = [f"  {fold(hosts)}: {message}" for (_, message), hosts in ordered]
    return "\n".join(lines + [f"hint: {hint}" for hint in hints])
