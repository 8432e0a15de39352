"""The GPUs whose clocks were lowered (``throttle`` in the usage samples): when, which, and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import fold
from ddplaunch.features.page.reading import line
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import duration, fold_ints, grouped

if TYPE_CHECKING:
    from ddplaunch.features.page.story import Span
    from ddplaunch.features.runs.run_json import Json

_MAX_GPUS = 4096
_MAX_NAMED = 6


NodeClocks = dict[tuple[int, str], tuple[float, float, set[int]]]
"""Of one node: for the place of a GPU in the samples and a reason, start and end of the time, and its steps."""


def add(clocks: NodeClocks, body: Json, steps: range, length_s: float) -> None:
    """A sample of ``length_s`` seconds that falls into ``steps``."""
    part = body.get("g")
    reasons = part.get("throttle") if isinstance(part, dict) else None
    if not isinstance(reasons, list) or not any(reasons):
        return
    for column, reason in enumerate(reasons[:_MAX_GPUS]):
        if isinstance(reason, str) and reason:
            key, start = (column, line(reason, 80)), body["t"] - length_s
            first, _, within = clocks.get(key, (start, start, set()))
            clocks[key] = (min(first, start), body["t"], within | set(steps))


@dataclass
class Lowered:
    """The GPUs whose clocks were lowered for one reason.

    Attributes:
        gpus: indices by host.
        first_s: start of the first sample, in seconds since 1970; ``last_s`` is the end of the last.
        counts: how many GPUs in each step.
    """

    reason: str
    first_s: float
    last_s: float
    counts: list[int]
    gpus: dict[str, list[int]] = field(default_factory=dict)


def by_reason(nodes: Sequence[tuple[str, list[int], NodeClocks]], steps: int) -> list[Lowered]:
    """``nodes``: host, indices of its GPUs, its clocks. The reason that concerns the most GPUs comes first."""
    found: dict[str, Lowered] = {}
    for host, indices, clocks in nodes:
        for (column, reason), (first, last, within) in clocks.items():
            each = found.setdefault(reason, Lowered(reason, first, last, [0] * steps))
            each.first_s, each.last_s = min(each.first_s, first), max(each.last_s, last)
            each.gpus.setdefault(host, []).append(indices[column] if column < len(indices) else column)
            for step in within:
                each.counts[step] += 1
    return sorted(found.values(), key=lambda each: -sum(map(len, each.gpus.values())))


def sentence(each: Lowered, whole: Span) -> str:
    """``GPU 3 of gpu1, from +2 min to +1 h``."""
    alike = grouped((f"GPU{'s' if len(gpus) > 1 else ''} {fold_ints(gpus)}", host) for host, gpus in each.gpus.items())
    groups = [f"{gpus} of {fold(hosts)}" for gpus, hosts in alike.items()]
    more = f"; {len(groups) - _MAX_NAMED} more groups" if len(groups) > _MAX_NAMED else ""
    start, end = (f"+{duration(max(0.0, time_s - whole.start))}" for time_s in (each.first_s, each.last_s))
    return f"{'; '.join(groups[:_MAX_NAMED])}{more}, from {start} to {end}"
