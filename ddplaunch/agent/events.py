"""What the agent's threads and signal handlers post to its main thread, besides the records of others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exited:
    """A child is dead and waits to be reaped: the worker ``local_rank``, or the store."""

    local_rank: int


@dataclass(frozen=True)
class ForkserverGone:
    """The forkserver's socket ended. Workers that run are not affected."""

    pid: int


@dataclass(frozen=True)
class LauncherGone:
    """The end of the agent's stdin: the launcher has ended, however it ended."""


@dataclass(frozen=True)
class Signalled:
    """Somebody sent a signal to the agent, not to the launcher."""

    signum: int


@dataclass(frozen=True)
class WorkersHeard:
    """A worker of ``attempt`` has written something, after a time in which none had."""

    attempt: int


@dataclass(frozen=True)
class FromMember:
    """What the member of the rendezvous ``token`` says; one that was left may still speak."""

    token: str
    record: object
