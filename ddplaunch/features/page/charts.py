"""Charts of usage: bands and lines as SVG paths over 1,000 by 100 units, and the values for the script. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplaunch.features.page.lowered_clocks import sentence
from ddplaunch.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddplaunch.features.page.lowered_clocks import Lowered
    from ddplaunch.features.page.usage import Band, Curve
    from ddplaunch.features.page.where_time_went import Span

_NICE = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_UNKNOWN = "."
LOWERED = "GPUs with lowered clocks"
MAX_BANDS = 6
"""Up to so many nodes have a band of their own; of more, the band is that of all."""


@dataclass(frozen=True)
class Series:
    """One band with its middle line, and perhaps a sentence about it; ``number`` chooses its colour."""

    name: str
    number: int
    band: str
    line: str
    text: str = ""


@dataclass(frozen=True)
class Line:
    """The curve of an outlier, with a sentence about it."""

    name: str
    text: str
    number: int
    line: str


@dataclass(frozen=True)
class Chart:
    """One chart, ready to draw. ``data`` is for the script."""

    title: str
    unit: str
    top: str
    summary: str
    series: tuple[Series, ...]
    outliers: tuple[Line, ...]
    data: dict[str, Any]


def chart(curve: Curve, *, has_nodes: bool) -> Chart:
    """The chart of ``curve``; ``has_nodes``: its data has every node."""
    largest = max((value for value in curve.all.high if value is not None), default=0.0)
    top = curve.quantity.top or nice(largest)
    bands = curve.nodes if len(curve.nodes) <= MAX_BANDS else {"all nodes": curve.all}
    series = [
        Series(name, index, _area(band, top), curve_line(band.mid, top))
        for index, (name, band) in enumerate(bands.items())
    ]
    unit = curve.quantity.unit
    outliers = [
        Line(each.name, f"{figure(each.mean)} {unit}, others {figure(each.usual)}", index, curve_line(each.values, top))
        for index, each in enumerate(curve.outliers)
    ]
    values = [value for value in curve.all.mid if value is not None]
    lows = [value for value in curve.all.low if value is not None]
    summary = f"{figure(min(lows, default=0))} to {figure(largest)}, usually {figure(_middle(values))}"
    data = {
        "title": curve.quantity.title,
        "unit": unit,
        "top": top,
        "low": [_rounded(value) for value in curve.all.low],
        "mid": [_rounded(value) for value in curve.all.mid],
        "high": [_rounded(value) for value in curve.all.high],
        "nodes": {name: _packed(band, top) for name, band in curve.nodes.items()} if has_nodes else {},
        **_owners(curve),
    }
    return Chart(curve.quantity.title, unit, figure(top), summary, tuple(series), tuple(outliers), data)


def lowered_chart(found: Sequence[Lowered], whole: Span) -> Chart | None:
    """How many GPUs had lowered clocks, a line for each reason, with the names of the GPUs; None if there were none."""
    if not found:
        return None
    all_counts = [float(sum(counts)) for counts in zip(*(each.counts for each in found), strict=True)]
    top = nice(max(all_counts))
    series = [
        Series(each.reason, number, "", curve_line(each.counts, top), sentence(each, whole))
        for number, each in enumerate(found[:MAX_BANDS])
    ]
    more = f"; {len(found) - MAX_BANDS} more reasons are in the samples" if len(found) > MAX_BANDS else ""
    data = {"title": LOWERED, "unit": "GPUs", "top": top, "nodes": {}}
    data |= dict.fromkeys(("low", "mid", "high"), all_counts)
    summary = f"up to {figure(max(all_counts))} at a time{more}"
    return Chart(LOWERED, "GPUs", figure(top), summary, tuple(series), (), data)


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


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


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


def _runs(values: Sequence[float | None]) -> list[range]:
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
    steps = len(band.mid)
    parts = []
    for run in _runs(band.mid):
        upper = [f"{_x(index, steps)} {_y(band.high[index] or 0.0, top)}" for index in run]
        lower = [f"{_x(index, steps)} {_y(band.low[index] or 0.0, top)}" for index in reversed(run)]
        parts.append("M" + "L".join([*upper, *lower]) + "z")
    return "".join(parts)


def _packed(band: Band, top: float) -> list[str]:
    return ["".join(_digit(value, top) for value in values) for values in (band.low, band.mid, band.high)]


def _digit(value: float | None, top: float) -> str:
    return _UNKNOWN if value is None else _DIGITS[round(min(1.0, max(0.0, value / top)) * 63)]
