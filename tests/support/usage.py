"""Usage samples for tests."""

from __future__ import annotations

from ddplaunch.features.usage.quantities import QUANTITIES
from ddplaunch.features.usage.records import UsageSample


def sample(at_s: float = 0.0, span_s: float = 2.0, value: float = 1.0, workers: int = 2, gpus: int = 0) -> UsageSample:
    """A sample in which everything has this value."""
    rows = {"n": 1, "w": workers, "g": gpus}
    values = {each.name: (value,) * rows[each.part] for each in QUANTITIES if rows[each.part]}
    return UsageSample(at_s=at_s, span_s=span_s, values=values, throttle=(None,) * gpus)
