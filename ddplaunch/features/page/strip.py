"""The time axis of a run: rows of nodes with a bar for each rank and attempt, as SVG paths; ticks. Pure.

A path is over 1,000 units of time by pixels, and only has numbers. Of many nodes, those that did the same share a row.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from ddplaunch.cluster.hostlist import fold
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import duration, fold_ints, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.features.page.story import NodeRow, RankBar, Story
    from ddplaunch.features.page.where_time_went import Span

UNITS = 1000
_MAX_SEPARATE = 12
_MAX_ROWS = 64
_PAD, _MIN_HEIGHT, _MAX_BARS_HEIGHT = 4, 22, 96
_TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
_MAX_TICKS = 7


@dataclass
class Row:
    """One line of the strip; ``y`` and ``height`` in pixels."""

    label: str
    note: str
    y: float
    height: float


@dataclass
class Strip:
    """All rows; ``paths`` are the bars by how they ended."""

    rows: list[Row] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)
    quiet: str = ""
    height: float = 0.0


@dataclass(frozen=True)
class Tick:
    """A label of the axis at ``x`` percent of its width; ``is_minor``: it is left out where there is little room."""

    x: float
    label: str
    is_minor: bool
    anchor: str


def strip(story: Story) -> Strip:
    """The rows and bars of all nodes."""
    groups = _groups(story)
    drawn, left = groups[:_MAX_ROWS], groups[_MAX_ROWS:]
    pitch = 8.0 if len(drawn) <= 4 else 5.0 if len(drawn) <= 16 else 3.0
    found, y = Strip(), 0.0
    parts: dict[str, list[str]] = {}
    for group in drawn:
        bars = _bars(group)
        ranks = sorted({bar.rank for bar in bars})
        step = min(pitch, _MAX_BARS_HEIGHT / max(1, len(ranks)))
        height = max(_MIN_HEIGHT, len(ranks) * step + _PAD * 2)
        top = y + (height - len(ranks) * step) / 2
        lines = {rank: top + index * step for index, rank in enumerate(ranks)}
        for bar in bars:
            parts.setdefault(bar.end, []).append(_bar(bar.span, story.whole, lines[bar.rank], step))
        found.rows.append(Row(_label(group), _note(group), y, height))
        y += height
    if left:
        nodes = sum(map(len, left))
        found.rows.append(Row(f"and {plural(nodes, 'more node')}", "", y, _MIN_HEIGHT))
        y += _MIN_HEIGHT
    found.paths = {end: "".join(pieces) for end, pieces in parts.items()}
    found.quiet = "".join(_rect(*_x(each, story.whole), 0, y) for each in story.quiet)
    found.height = y
    return found


def _groups(story: Story) -> list[list[NodeRow]]:
    """The nodes of each row: all for themselves, or of many nodes those together that did the same."""
    if len(story.nodes) <= _MAX_SEPARATE:
        return [[node] for node in story.nodes]
    special = {moment.where.partition(" ")[0] for moment in story.moments if moment.mark and moment.where}
    groups: dict[object, list[NodeRow]] = {}
    for node in story.nodes:
        did = tuple(sorted({(bar.attempt, bar.end) for bar in node.bars}))
        is_alone = node.host in special or any(bar.end == "failed" for bar in node.bars)
        groups.setdefault(node.host if is_alone else did, []).append(node)
    return sorted(groups.values(), key=lambda group: len(group) > 1)


def _bars(group: Sequence[NodeRow]) -> list[RankBar]:
    """The bars of a row: of each rank, or if several nodes share it, of one for all in each attempt."""
    if len(group) == 1:
        return group[0].bars
    from ddplaunch.features.page.story import RankBar
    from ddplaunch.features.page.where_time_went import Span

    found: dict[int, RankBar] = {}
    for bar in (bar for node in group for bar in node.bars):
        known = found.get(bar.attempt, bar).span
        span = Span(min(known.start, bar.span.start), max(known.end, bar.span.end))
        found[bar.attempt] = RankBar(0, bar.attempt, span, bar.end)
    return list(found.values())


def _label(group: Sequence[NodeRow]) -> str:
    return group[0].host if len(group) == 1 else fold([node.host for node in group])


def _note(group: Sequence[NodeRow]) -> str:
    if len(group) > 1:
        return plural(len(group), "node")
    last = max((bar.attempt for bar in group[0].bars), default=0)
    ranks = [bar.rank for bar in group[0].bars if bar.attempt == last]
    return f"rank{'s' if len(ranks) > 1 else ''} {fold_ints(ranks)}" if ranks else ""


def _x(span: Span, whole: Span) -> tuple[float, float]:
    length = whole.length or 1.0
    start = (span.start - whole.start) / length * UNITS
    return start, max(1.0, (span.end - span.start) / length * UNITS)


def _bar(span: Span, whole: Span, y: float, step: float) -> str:
    gap = 1.0 if step >= 4 else 0.0
    return _rect(*_x(span, whole), y, step - gap)


def _rect(x: float, width: float, y: float, height: float) -> str:
    return f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"


def percent(time_s: float, whole: Span) -> float:
    """Where ``time_s`` is on the axis, in percent of its width."""
    return round(min(100.0, max(0.0, (time_s - whole.start) / (whole.length or 1.0) * 100)), 2)


def ticks(whole: Span) -> list[Tick]:
    """At most 8 round times since the start."""
    step = next((each for each in _TICKS_S if whole.length / each <= _MAX_TICKS), _TICKS_S[-1])
    times = [index * step for index in range(min(_MAX_TICKS + 1, int(whole.length // step) + 1))]
    return [_tick(time_s, percent(whole.start + time_s, whole), index) for index, time_s in enumerate(times)]


def _tick(time_s: float, x: float, index: int) -> Tick:
    anchor = "start" if x < 6 else "end" if x > 94 else "middle"
    return Tick(x, duration(time_s) if time_s else "0", index % 2 == 1, anchor)
