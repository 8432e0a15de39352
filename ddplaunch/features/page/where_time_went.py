"""Where the time of a run went: connect, import, rendezvous, run, silent, restart, end. Pure."""

from __future__ import annotations

import itertools

from ddplaunch.late_dataclass import dataclass

USES = {
    "connect": "until all agents were ready",
    "import": "importing torch before the first worker",
    "rendezvous": "until the nodes had met and all workers ran",
    "run": "workers ran, and wrote output or called collectives",
    "silent": "workers ran, without output and collectives for a minute or more",
    "restart": "from the end of an attempt until the next one ran",
    "end": "after the last attempt: logs and report",
}


@dataclass(frozen=True)
class Span:
    """From ``start`` to ``end``, in seconds since 1970."""

    start: float
    end: float

    @property
    def length(self) -> float:
        return max(0.0, self.end - self.start)

    def common(self, other: Span) -> float:
        """Seconds in which both are."""
        return max(0.0, min(self.end, other.end) - max(self.start, other.start))


@dataclass(frozen=True)
class TimeUse:
    """What a part of the run's time went into.

    Attributes:
        share: of the whole run, from 0 to 1.
    """

    name: str
    meaning: str
    length_s: float
    share: float


def time_uses(
    whole: Span, ready_s: float | None, import_s: float, attempts: list[Span], quiet: list[Span]
) -> tuple[TimeUse, ...]:
    """The uses that took any time.

    ``ready_s``: when the last agent was ready; ``attempts``: when all workers of each ran; ``quiet``: when none did
    anything that can be seen.
    """
    first = attempts[0].start if attempts else whole.end
    ready = min(max(whole.start, ready_s if ready_s is not None else whole.start), first)
    imported = min(import_s, first - ready)
    silent = sum(attempt.common(each) for attempt in attempts for each in quiet)
    lengths = {
        "connect": ready - whole.start,
        "import": imported,
        "rendezvous": first - ready - imported,
        "run": sum(attempt.length for attempt in attempts) - silent,
        "silent": silent,
        "restart": sum(max(0.0, after.start - before.end) for before, after in itertools.pairwise(attempts)),
        "end": max(0.0, whole.end - attempts[-1].end) if attempts else 0.0,
    }
    total = whole.length or 1.0
    return tuple(
        TimeUse(name, USES[name], length, min(1.0, length / total)) for name, length in lengths.items() if length > 0
    )
