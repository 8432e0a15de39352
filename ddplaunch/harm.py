"""What the launcher of a rehearsal and its agents say of harm done to workers on purpose: ``--inject``; records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inflict:
    """To the agent: harm one worker of ``attempt``; answered by ``Inflicted``.

    Attributes:
        signum: SIGKILL for it alone, or what its process group gets.
        code: the exit code as which its end by SIGKILL is told; None for what it is.
        factor: in place of a signal, everything takes it this many times as long from now on.
    """

    number: int
    attempt: int
    local_rank: int
    signum: int = 0
    code: int | None = None
    factor: float | None = None


@dataclass(frozen=True)
class Inflicted:
    """Answer to the ``Inflict`` of this number. ``happened`` is false where the worker had ended before."""

    number: int
    happened: bool
