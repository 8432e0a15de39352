"""Usage samples of all nodes of this launcher: receives them, gives them its own time, and has them written.

Runs in the launcher, in the main thread; ``UsageFiles`` writes in a thread. Nothing here affects the run.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from ddplaunch.features.usage.records import UsageSampled, UsageStarted
from ddplaunch.features.usage.usage_files import SCHEMA, Row, UsageFiles, row

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddplaunch.launcher.nodes import Nodes
    from ddplaunch.protocol.specs import UsageRecord

_MAX_DRIFT = 1e-3
"""By which two clocks may differ in their speed."""

_MAX_AGE_S = 86400.0


class UsageWatch:
    """Watches one run."""

    def __init__(self, nodes: Nodes, folder: Callable[[], Path | None], *, is_local: bool) -> None:
        """``folder`` returns the run's. ``is_local``: the nodes are on this machine."""
        self._is_local, self._nodes, self._folder = is_local, nodes, folder
        self._files = UsageFiles(folder)
        self._clocks: dict[int, Clock] = {}
        self._started: dict[int, UsageStarted] = {}

    def on_event(self, index: int, event: UsageRecord) -> None:
        """A record of node ``index``."""
        match event:
            case UsageStarted():
                self._started[index] = event
                self._on_started(index, event)
            case UsageSampled(attempt=attempt) if self._is_current(index, event):
                times = [self._time_s(index, sample.at_s) for sample in event.samples]
                if self._folder():
                    rows = [row(attempt, t, sample) for t, sample in zip(times, event.samples, strict=True)]
                    self._files.put(index, rows)

    def _is_current(self, index: int, event: UsageSampled) -> bool:
        started = self._started.get(index)
        return started is not None and started.attempt == event.attempt

    def _on_started(self, index: int, event: UsageStarted) -> None:
        t = self._time_s(index, event.at_s)
        if self._folder():
            start = {"attempt": event.attempt, "t": round(t, 1), "ranks": event.ranks, "gpu": event.gpu_of_worker}
            line = json.dumps(start, separators=(",", ":"))
            self._files.put(index, [Row(event.attempt, t, 0.0, line)], _head(index, self._nodes.all[index].host, event))

    def _time_s(self, index: int, at_s: float) -> float:
        """A time of an agent's ``time.monotonic()`` in seconds since 1970, by this machine's clock."""
        clock = self._clocks.setdefault(index, Clock(is_ours=self._is_local))
        now = time.monotonic()
        return time.time() - min(max(now - clock.ours(at_s, now), 0.0), _MAX_AGE_S)

    def close(self) -> None:
        """Write what has not been written yet."""
        self._files.close()


def _head(index: int, host: str, event: UsageStarted) -> str:
    gpus = [{"index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "memory": gpu.memory_bytes} for gpu in event.gpus]
    head = {"schema": SCHEMA, "node": index, "host": host, "cpus": event.cpus, "memory": event.memory_bytes}
    return json.dumps({**head, "gpus": gpus}, separators=(",", ":"))


class Clock:
    """Converts times of another machine's ``time.monotonic()`` into ours, by the record that was fastest.

    Clocks of two machines are not compared: a record cannot arrive before it was sent, so that the smallest difference
    seen is the best. It may grow slowly, since clocks drift.
    """

    def __init__(self, *, is_ours: bool) -> None:
        """``is_ours``: both processes are on this machine."""
        self._offset_s: float | None = 0.0 if is_ours else None
        self._is_fixed, self._at = is_ours, 0.0

    def ours(self, theirs: float, now: float) -> float:
        """Our time at ``theirs``; ``now`` is ours when the record arrived."""
        if not self._is_fixed:
            latest = now - theirs
            drifted = latest if self._offset_s is None else self._offset_s + _MAX_DRIFT * (now - self._at)
            self._offset_s, self._at = min(latest, drifted), now
        return theirs + (self._offset_s or 0.0)
