"""When workers called collectives, and what else they did meanwhile: ``CollectivesSampled`` and its parts.

Sent by agents to the launcher, once a minute and worker: so they are small, and times are packed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from ddplaunch.cluster.hosts import MAX_SLOTS_PER_HOST
from ddplaunch.features.hangs.records import MAX_GROUPS
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, Limit, Nanoseconds, OneLine, Seconds, Size, at_most
from ddplaunch.protocol.launcher_agent import OfRanks, Order, Report

MAX_SENT = 1000
"""Calls of one worker in a sample, of all its process groups together."""

NO_TIME = "-"
"""In place of a gap: this call does not count, such as a broadcast, in which not all ranks wait for each other."""

_GAP = f"(?:{NO_TIME}|[0-9]{{1,15}})"
_GAPS = re.compile(f"{_GAP}(?:,{_GAP}){{0,{MAX_SENT - 1}}}")

Gaps = Annotated[str, Limit(f"up to {MAX_SENT} numbers", lambda text: bool(_GAPS.fullmatch(text)))]


@dataclass(frozen=True)
class CollectiveTimes:
    """When a rank called consecutive collectives of one process group, to the microsecond.

    Attributes:
        group: name of the process group.
        first_number: number of the first call.
        first_ns: time of the first call that counts, nanoseconds since the epoch by the clock of the host.
        gaps_us: for each call the microseconds since the last call that counts, separated by commas; or ``NO_TIME``.
    """

    rank: Count
    group: OneLine
    first_number: Count
    first_ns: Nanoseconds
    gaps_us: Gaps

    def calls(self) -> Iterator[tuple[int, int]]:
        """Number of each call that counts, and its time in nanoseconds."""
        now = self.first_ns
        for number, gap in enumerate(self.gaps_us.split(","), self.first_number):
            if gap != NO_TIME:
                now += int(gap) * 1000
                yield number, now


def pack(rank: int, group: str, calls: Mapping[int, int]) -> CollectiveTimes:
    """``calls``: the time of at least one call, in nanoseconds by its number; the newest ``MAX_SENT`` numbers are kept.

    A call that is missing, or whose time is 0, does not count.
    """
    last = max(calls)
    first = max(min(calls), last - MAX_SENT + 1)
    created = [calls.get(number, 0) for number in range(first, last + 1)]
    first_ns = next((ns for ns in created if ns > 0), 0)
    return CollectiveTimes(rank, group, first, first_ns, ",".join(_gaps(created, first_ns)))


def _gaps(created: Iterable[int], last_ns: int) -> Iterator[str]:
    for ns in created:
        if ns <= 0:
            yield NO_TIME
            continue
        gap_us = max(0, ns - last_ns) // 1000  # Negative where the clock was set back.
        last_ns += gap_us * 1000  # Not ns: the rounding would add up.
        yield str(gap_us)


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """What a worker did between the two last samples, which are ``window_s`` seconds apart.

    Attributes:
        cpu_s: CPU seconds of the worker and its descendants.
        io_bytes: bytes that they read and wrote, pipes and page cache included.
        run_queue_wait_s: seconds for which its main thread was ready but had no CPU.
        throttled: why the clock of its GPU is lowered; empty if it is not, or was not asked.
    """

    rank: Count
    window_s: Seconds
    cpu_s: Seconds = 0.0
    io_bytes: Size = 0
    run_queue_wait_s: Seconds = 0.0
    throttled: OneLine = ""


@dataclass(frozen=True)
class CollectivesSampled(Report, OfRanks):
    """Agent to launcher, in answer to SampleCollectives; or with number 0 once the workers have a process group.

    Attributes:
        host: display name of the node; its workers share a clock.
        times: of each worker that has answered, and of each of its process groups.
        cost_s: CPU seconds that the answer took in the worker where it took longest.
        clock_ns: the host's clock when it was asked, nanoseconds since the epoch, in a record that is sent at once and
            is otherwise empty; 0 in the answer itself.
        is_debugged: in the record with ``clock_ns``: a rank of the node has stopped in a debugger in this attempt.
    """

    attempt: Count
    number: Count
    host: OneLine
    times: Annotated[tuple[CollectiveTimes, ...], at_most(MAX_SLOTS_PER_HOST * MAX_GROUPS)] = ()
    loads: Annotated[tuple[RankLoad, ...], at_most(MAX_SLOTS_PER_HOST)] = ()
    cost_s: Seconds = 0.0
    clock_ns: Nanoseconds = 0
    is_debugged: bool = False

    @property
    def named_ranks(self) -> set[int]:
        """As ``OfRanks.named_ranks``."""
        return {*(each.rank for each in self.times), *(each.rank for each in self.loads)}


@dataclass(frozen=True)
class SampleCollectives(Order):
    """Launcher to all agents, about once a minute: when did the workers of ``attempt`` call collectives?

    Answered by CollectivesSampled ``number``. ``suspects`` are ranks whose GPUs are asked whether they are throttled.
    """

    attempt: Count
    number: Count
    suspects: Annotated[tuple[Count, ...], at_most(1 << 16)] = ()


TO_AGENT = (SampleCollectives,)
FROM_AGENT = (CollectivesSampled,)
