"""What the page draws, as SVG paths: charts of usage, and the time axis with a bar for each rank and attempt. Pure.

Paths only have numbers. A chart is over 1,000 by 100 units, and has the values for the script; the axis is over 1,000
units by pixels. Of many nodes, those that did the same share a row of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ddplaunch.cluster.hosts import fold
from ddplaunch.features.page.lowered_clocks import Lowered, sentence
from ddplaunch.features.page.story import RankBar, Span, Story
from ddplaunch.features.page.usage import Band, Curve, Point, middles
from ddplaunch.text import duration, fold_ints, grouped, plural

_NICE = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_UNKNOWN = "."
_UNITS = 1000
_MAX_SEPARATE = 12
_MAX_ROWS = 64
_PAD, _MIN_HEIGHT, _MAX_BARS_HEIGHT = 4, 22, 96
_TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
_MAX_TICKS = 7
MAX_BANDS = 6
"""Up to so many nodes have a band of their own; of more, the band is that of all."""


def chart(curve: Curve, *, has_nodes: bool) -> dict[str, Any]:
    """The chart of ``curve`` for the template. The key ``data`` is for the script.

    ``has_nodes``: ``data`` has the values of each node, too.
    """
    known = [point for point in curve.all if point]
    largest = max(point.high for point in known)
    top, unit = curve.quantity.top or nice(largest), curve.quantity.chart_unit
    bands = curve.nodes if 0 < len(curve.nodes) <= MAX_BANDS else {"all nodes": curve.all}
    least, middle = min(point.low for point in known), sorted(point.mid for point in known)[len(known) // 2]
    return {
        "title": curve.quantity.title,
        "unit": unit,
        "top": figure(top),
        "summary": f"{figure(least)} to {figure(largest)}, usually {figure(middle)}",
        "series": [_line(name, middles(band), top, band=_area(band, top)) for name, band in bands.items()],
        "outliers": [
            _line(each.name, each.values, top, text=f"{figure(each.mean)} {unit}, others {figure(each.usual)}")
            for each in curve.outliers
        ],
        "data": {
            **{name: [_rounded(point and getattr(point, name)) for point in curve.all] for name in Point._fields},
            "nodes": {name: _packed(band, top) for name, band in curve.nodes.items()} if has_nodes else {},
            **_owners(curve),
        },
    }


def lowered_chart(found: Sequence[Lowered], whole: Span) -> dict[str, Any]:
    """How many GPUs had lowered clocks, a line for each reason, with the names of the GPUs; ``found`` has some."""
    all_counts = [float(sum(counts)) for counts in zip(*(each.counts for each in found), strict=True)]
    top = nice(max(all_counts))
    more = f"; {len(found) - MAX_BANDS} more reasons are in the samples" if len(found) > MAX_BANDS else ""
    return {
        "title": "GPUs with lowered clocks",
        "unit": "GPUs",
        "top": figure(top),
        "summary": f"up to {figure(max(all_counts))} at a time{more}",
        "series": [_line(each.reason, each.counts, top, text=sentence(each, whole)) for each in found[:MAX_BANDS]],
        "outliers": [],
        "data": {"nodes": {}, **dict.fromkeys(Point._fields, all_counts)},
    }


def _line(name: str, values: Sequence[float | None], top: float, *, band: str = "", text: str = "") -> dict[str, str]:
    """A line, perhaps with a band around it and a sentence about it."""
    return {"name": name, "line": curve_line(values, top), "band": band, "text": text}


def _owners(curve: Curve) -> dict[str, Any]:
    """Whose the smallest and largest values are, as places in a list of names; nothing if there is only one name."""
    names = list(dict.fromkeys([*curve.low_of, *curve.high_of]))
    if len([name for name in names if name]) < 2:
        return {}
    place = {name: index for index, name in enumerate(names)}
    return {
        "names": names,
        "lowOf": [place[name] for name in curve.low_of],
        "highOf": [place[name] for name in curve.high_of],
    }


def figure(value: float) -> str:
    """A number with three digits, without an exponent."""
    if 0 < abs(value) < 0.001:
        return "under 0.001"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def nice(largest: float) -> float:
    """A round number that is at least ``largest``."""
    power = 1e-6
    while power * 10 < largest:
        power *= 10
    return next((step * power for step in _NICE if step * power >= largest), largest) or 1.0


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def _x(index: int, steps: int) -> str:
    return f"{(index + 0.5) / steps * 1000:.0f}"


def _y(value: float, top: float) -> str:
    return f"{100 - min(1.0, max(0.0, value / top)) * 100:.1f}".removesuffix(".0")


def _runs(values: Sequence[object]) -> list[range]:
    """The steps with values, without gaps."""
    runs: list[range] = []
    for index, value in enumerate(values):
        if value is not None:
            is_next = bool(runs) and runs[-1].stop == index
            runs[-1:] = [range(runs[-1].start, index + 1)] if is_next else [*runs[-1:], range(index, index + 1)]
    return runs


def curve_line(values: Sequence[float | None], top: float) -> str:
    """The line through these values as an SVG path, with gaps where there is none."""
    steps = len(values)
    parts = []
    for run in _runs(values):
        points = [f"{_x(index, steps)} {_y(values[index] or 0.0, top)}" for index in run]
        parts.append("M" + "L".join(points if len(points) > 1 else points * 2))
    return "".join(parts)


def _area(band: Band, top: float) -> str:
    parts = []
    for run in _runs(band):
        points = [(_x(index, len(band)), point) for index in run if (point := band[index])]
        upper = [f"{x} {_y(point.high, top)}" for x, point in points]
        lower = [f"{x} {_y(point.low, top)}" for x, point in reversed(points)]
        parts.append("M" + "L".join([*upper, *lower]) + "z")
    return "".join(parts)


def _packed(band: Band, top: float) -> list[str]:
    return ["".join(_digit(point and getattr(point, name), top) for point in band) for name in Point._fields]


def _digit(value: float | None, top: float) -> str:
    return _UNKNOWN if value is None else _DIGITS[round(min(1.0, max(0.0, value / top)) * 63)]


# The time axis.


def strip(story: Story) -> dict[str, Any]:
    """The rows and bars of all nodes.

    Each of ``rows`` has ``label``, ``note``, ``y`` and ``height`` in pixels; ``paths`` are the bars by how they ended,
    ``quiet`` is that of the times without output, and ``height`` that of all rows.
    """
    groups = _groups(story)
    drawn, left = groups[:_MAX_ROWS], groups[_MAX_ROWS:]
    pitch = 8.0 if len(drawn) <= 4 else 5.0 if len(drawn) <= 16 else 3.0
    rows, y = list[dict[str, Any]](), 0.0
    parts: dict[str, list[str]] = {}
    for hosts in drawn:
        bars = _bars([story.nodes[host] for host in hosts])
        ranks = sorted({bar.rank for bar in bars})
        step = min(pitch, _MAX_BARS_HEIGHT / max(1, len(ranks)))
        height = max(_MIN_HEIGHT, len(ranks) * step + _PAD * 2)
        top = y + (height - len(ranks) * step) / 2
        lines = {rank: top + index * step for index, rank in enumerate(ranks)}
        for bar in bars:
            parts.setdefault(bar.end, []).append(_bar(bar.span, story.whole, lines[bar.rank], step))
        rows.append(_row(fold(hosts) if hosts[1:] else hosts[0], _note(hosts, bars), y, height))
        y += height
    if left:
        nodes = sum(map(len, left))
        rows.append(_row(f"and {plural(nodes, 'more node')}", "", y, _MIN_HEIGHT))
        y += _MIN_HEIGHT
    paths = {end: "".join(pieces) for end, pieces in parts.items()}
    quiet = "".join(_rect(*_span_x(each, story.whole), 0, y) for each in story.quiet)
    return {"rows": rows, "paths": paths, "quiet": quiet, "height": y}


def _row(label: str, note: str, y: float, height: float) -> dict[str, Any]:
    return {"label": label, "note": note, "y": y, "height": height}


def _groups(story: Story) -> list[list[str]]:
    """The hosts of each row: all for themselves, or of many nodes those together that did the same."""
    if len(story.nodes) <= _MAX_SEPARATE:
        return [[host] for host in story.nodes]
    special = {moment.where.partition(" ")[0] for moment in story.moments if moment.mark and moment.where}

    def key(host: str, bars: list[RankBar]) -> object:
        is_alone = host in special or any(bar.end == "failed" for bar in bars)
        return host if is_alone else tuple(sorted({(bar.attempt, bar.end) for bar in bars}))

    groups = grouped((key(host, bars), host) for host, bars in story.nodes.items())
    return sorted(groups.values(), key=lambda hosts: len(hosts) > 1)


def _bars(nodes: Sequence[list[RankBar]]) -> list[RankBar]:
    """The bars of a row: of each rank, or if several nodes share it, of one for all in each attempt."""
    if len(nodes) == 1:
        return nodes[0]
    found: dict[int, RankBar] = {}
    for bar in itertools.chain(*nodes):
        known = found.get(bar.attempt, bar).span
        span = Span(min(known.start, bar.span.start), max(known.end, bar.span.end))
        found[bar.attempt] = RankBar(0, bar.attempt, span, bar.end)
    return list(found.values())


def _note(hosts: Sequence[str], bars: Sequence[RankBar]) -> str:
    if len(hosts) > 1:
        return plural(len(hosts), "node")
    last = max((bar.attempt for bar in bars), default=0)
    ranks = [bar.rank for bar in bars if bar.attempt == last]
    return f"rank{'s' if len(ranks) > 1 else ''} {fold_ints(ranks)}" if ranks else ""


def _span_x(span: Span, whole: Span) -> tuple[float, float]:
    length = whole.length or 1.0
    start = (span.start - whole.start) / length * _UNITS
    return start, max(1.0, (span.end - span.start) / length * _UNITS)


def _bar(span: Span, whole: Span, y: float, step: float) -> str:
    gap = 1.0 if step >= 4 else 0.0
    return _rect(*_span_x(span, whole), y, step - gap)


def _rect(x: float, width: float, y: float, height: float) -> str:
    return f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"


def percent(time_s: float, whole: Span) -> float:
    """Where ``time_s`` is on the axis, in percent of its width."""
    return round(min(100.0, max(0.0, (time_s - whole.start) / (whole.length or 1.0) * 100)), 2)


def ticks(whole: Span) -> list[dict[str, Any]]:
    """At most 8 round times since the start, each with a ``label`` at ``x`` percent of the axis.

    ``is_minor``: it is left out where there is little room.
    """
    longest = math.ceil(whole.length / _MAX_TICKS / _TICKS_S[-1]) * _TICKS_S[-1]
    step = next((each for each in _TICKS_S if whole.length / each <= _MAX_TICKS), longest)
    times = [index * step for index in range(min(_MAX_TICKS + 1, int(whole.length // step) + 1))]
    return [_tick(time_s, percent(whole.start + time_s, whole), index) for index, time_s in enumerate(times)]


def _tick(time_s: float, x: float, index: int) -> dict[str, Any]:
    anchor = "start" if x < 6 else "end" if x > 94 else "middle"
    return {"x": x, "label": duration(time_s) if time_s else "0", "is_minor": index % 2 == 1, "anchor": anchor}
