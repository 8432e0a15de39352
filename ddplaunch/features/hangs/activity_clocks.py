"""Since when the workers of this node have done nothing, from their output and from samples of them.

Runs in the agent, main thread only. All times are those of ``time.monotonic()``. Imports late what judges samples: a
short run takes none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.features.hangs.evidence import Sample
    from ddplaunch.features.hangs.rank_state import RankState


class ActivityClocks:
    """Of the workers of one attempt.

    Attributes:
        samples: the newest, by local rank.
    """

    def __init__(self, group: WorkerGroup, now: float) -> None:
        self._group = group
        self.samples: Mapping[int, Sample] = {}
        self._active_samples: Mapping[int, Sample] = {}
        """Those of when a worker last moved or was busy: whoever does little is seen over a longer time."""
        self._moved_at = self._busy_at = now
        self._collective_at: float | None = None
        """None: not known."""

    def restart(self, now: float) -> None:
        """The workers have just begun, or nothing before ``now`` counts: the whole machine was suspended."""
        self._moved_at = self._busy_at = now
        self._collective_at = None if self._collective_at is None else now

    def quiet_s(self, now: float) -> float:
        """As ``WorkerActivity.quiet_s``."""
        written = (stream.written_s for stream in self._group.streams)
        return now - max([self._moved_at, self._last_debugged(now), *written])

    def still_s(self, now: float) -> float:
        """As ``WorkerActivity.still_s``."""
        return min(self.quiet_s(now), now - self._busy_at)

    def waiting_s(self, now: float) -> float:
        """As ``WorkerActivity.waiting_s``."""
        if self._collective_at is None:
            return 0.0
        return max(0.0, now - max(self._collective_at, self._last_debugged(now)))

    def _last_debugged(self, now: float) -> float:
        """Until when ranks waited for the user of a debugger, not for each other."""
        return now if self._group.debugged else self._group.debugged_at

    def take(self, samples: Mapping[int, Sample], now: float) -> Mapping[int, Sample]:
        """Take new samples of the workers that run. Returns those with which they are to be compared."""
        from ddplaunch.features.hangs.rank_state import ACTIVE, RankState

        previous, self.samples = self.samples, samples
        choices = [(earlier, self._states(earlier)) for earlier in (previous, self._active_samples)]
        earlier, states = next((choice for choice in choices if choice[1] & ACTIVE), choices[0])
        if RankState.MOVING in states:
            self._moved_at = now
        if states & ACTIVE - {RankState.MOVING}:
            self._busy_at = now
        if states & ACTIVE:
            self._active_samples = samples
        statuses, before = _statuses(samples), _statuses(previous)
        if not statuses:
            self._collective_at = None
        elif self._collective_at is None or not statuses.items() <= before.items():
            self._collective_at = now
        return earlier

    def _states(self, earlier: Mapping[int, Sample]) -> set[RankState]:
        from ddplaunch.features.hangs import evidence
        from ddplaunch.features.hangs.rank_state import rank_state

        return {rank_state(each) for each in evidence.of_group(self._group, self.samples, earlier)}

    @property
    def has_waiting(self) -> bool:
        """As ``WorkerActivity.has_waiting``."""
        from ddplaunch.features.hangs import evidence
        from ddplaunch.features.hangs.rank_state import waits

        return any(map(waits, evidence.of_group(self._group, self.samples, {})))


def _statuses(samples: Mapping[int, Sample]) -> dict[int, tuple[int, bytes]]:
    return {rank: (sample.activity.pid, sample.status) for rank, sample in samples.items() if sample.status}
