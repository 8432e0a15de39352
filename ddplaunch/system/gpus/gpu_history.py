"""What the last minutes say about a GPU. Runs in the child of ``gpu_health``."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

_HARDWARE_SLOWDOWN = 0x8 | 0x40 | 0x80
"""nvmlClocksEventReasonHwSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown."""

_THROTTLED_MINUTES, _NVLINK_MINUTES = 10, 30


class _Minutes:
    """In how many of the last minutes something was bad."""

    def __init__(self, count: int, minute_s: float) -> None:
        self._count, self._minute_s = count, minute_s
        self._bad: deque[float] = deque()

    def add(self, is_bad: bool) -> int:
        minute = time.monotonic() // self._minute_s
        if is_bad and minute not in self._bad:
            self._bad.append(minute)
        while self._bad and self._bad[0] <= minute - self._count:
            self._bad.popleft()
        return len(self._bad)


class History:
    """The last minutes of one GPU."""

    def __init__(self, minute_s: float) -> None:
        self._throttled = _Minutes(_THROTTLED_MINUTES, minute_s)
        self._link_errors = _Minutes(_NVLINK_MINUTES, minute_s)
        self._errors: int | None = None

    def add_to(self, gpu: dict[str, Any]) -> None:
        """Adds what the minutes say to a reading, which is one of them."""
        gpu["throttled_minutes"] = self._throttled.add(bool(gpu.get("clock_reasons", 0) & _HARDWARE_SLOWDOWN))
        errors = gpu.get("nvlink_errors")
        has_more = errors is not None and self._errors is not None and errors > self._errors
        gpu["nvlink_error_minutes"] = self._link_errors.add(has_more)
        self._errors = errors
