"""Why hosts could not be reached or cannot run the job, and all of it as one table. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ddplaunch.host_ranges import fold

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

NO_ROOM_HINT = (
    "Look at the limits of processes and files (`ulimit -u -n`, the container's pids limit) and at the memory."
)
"""What may be done where this machine can start no more."""


@dataclass(frozen=True)
class HostFailure:
    """One host that cannot take part.

    Attributes:
        message: what happened, without the host's name, so that equal ones fold.
        hint: what the user can do; may be empty.
    """

    host: str
    cause: Cause
    message: str
    hint: str = ""


class Unreachable(Exception):
    """A host could not be connected to; a HostFailure without the host.

    Attributes:
        tries: how many in all may help; 1 means that another one cannot, or must not be made.
        is_dropped: the server was there and hung up before it knew who we are; it may have too much to do.
    """

    def __init__(self, cause: Cause, message: str, hint: str = "", *, tries: int = 1, is_dropped: bool = False) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message
        self.hint = hint
        self.tries = tries
        self.is_dropped = is_dropped


def failures_table(failures: Iterable[HostFailure]) -> str:
    """One line per thing that went wrong, with all hosts it holds for, then what to do about each.

    The most frequent first: it is the one to look at.
    """
    failed: dict[tuple[Cause, str], list[str]] = {}
    hints: dict[str, None] = {}
    for failure in failures:
        failed.setdefault((failure.cause, failure.message), []).append(failure.host)
        if failure.hint:
            hints[failure.hint] = None
    ordered = sorted(failed.items(), key=lambda item: -len(item[1]))
    lines = [f"  {fold(hosts)}: {message}" for (_, message), hosts in ordered]
    return "\n".join(lines + [f"hint: {hint}" for hint in hints])
