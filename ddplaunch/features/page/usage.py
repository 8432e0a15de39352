"""Usage samples of a run folder (``samples/node_K.jsonl``) as curves, and the ranks or GPUs that are unlike the others.

A curve has the smallest, middle and largest value of each node over time. One file is in memory at a time.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple

from ddplaunch.features.page.lowered_clocks import Lowered, NodeClocks, add, by_reason
from ddplaunch.features.page.reading import line
from ddplaunch.features.runs import run_json
from ddplaunch.features.runs.run_json import Json, dicts, integer, integers
from ddplaunch.features.usage.quantities import QUANTITIES, Quantity
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import grouped, median

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.features.page.story import Span

_MAX_OUTLIERS = 3
_MIN_ALIKE = 3
_FAR, _SPREADS = 0.15, 8
"""An outlier is further from the middle than this share of it, and than so many times the usual distance: of thousands
of values that differ by chance only, none is."""

_MAX_COLUMNS = 4096
_MANY, _EACH = 50, 7
"""Of many samples, each 7th counts for the mean of a column: the page must be made within seconds."""

MAX_NODES_WITH_DATA = 128
MAX_WHOLE = 512
"""Of more nodes, one sample of each step is read: their files have gigabytes."""

_HUGE = 1e18
_DRAWN = [each for each in QUANTITIES if each.title]
_PARTS = {part: [(each.key, each) for each in _DRAWN if each.part == part] for part in ("n", "w", "g")}


_TIME = re.compile(rb'{"t":([0-9]{1,12}(?:\.[0-9]{1,9})?),')
"""The begin of a sample's line."""


class Point(NamedTuple):
    """The smallest, middle and largest value of a step of time."""

    low: float
    mid: float
    high: float


Band = list[Point | None]
"""A curve over equal steps of time; None where there was no sample."""


@dataclass
class Outlier:
    """A rank, GPU or node that is unlike the others."""

    name: str
    mean: float
    usual: float
    node: int
    column: int
    values: list[float | None] = field(default_factory=list)


@dataclass
class Curve:
    """A quantity of the whole run.

    Attributes:
        nodes: a band for each node with a sample; empty for more than ``MAX_NODES_WITH_DATA`` nodes.
        low_of: whose the smallest value of each step is, and ``high_of`` the largest; empty where there is no sample.
    """

    quantity: Quantity
    all: Band
    nodes: dict[str, Band]
    outliers: list[Outlier]
    low_of: list[str]
    high_of: list[str]


@dataclass
class Usage:
    """What the samples of a run say; ``hosts`` have some, ``damaged`` lines could not be read."""

    curves: list[Curve]
    lowered: list[Lowered]
    hosts: set[str]
    damaged: int


class _Sums:
    """What one node's samples say of one quantity, while its file is read."""

    def __init__(self, steps: int) -> None:
        self.low, self.high = array("d", [math.inf]) * steps, array("d", [-math.inf]) * steps
        self.low_of, self.high_of = array("H", [0]) * steps, array("H", [0]) * steps
        self.mid, self.weight = array("d", [0.0]) * steps, array("d", [0.0]) * steps
        self.totals, self.weights = array("d"), array("d")

    def add(self, steps: range, values: list[Any], span_s: float, *, is_counted: bool = True) -> None:
        """A sample that lasted ``span_s`` and falls into ``steps``; ``is_counted``: in the mean of each column, too."""
        extremes = _extremes(values)
        if extremes is None:
            return
        low, middle, high = extremes
        if is_counted:
            self._count(values, span_s)
        for step in steps:
            if low < self.low[step]:
                self.low[step], self.low_of[step] = low, values.index(low)
            if high > self.high[step]:
                self.high[step], self.high_of[step] = high, values.index(high)
            self.mid[step] += middle * span_s
            self.weight[step] += span_s

    def _count(self, values: list[Any], span_s: float) -> None:
        missing = len(values) - len(self.totals)
        self.totals.extend([0.0] * missing)
        self.weights.extend([0.0] * missing)
        for index, value in enumerate(values):
            if _is_value(value):
                self.totals[index] += value * span_s
                self.weights[index] += span_s

    def band(self, scale: float) -> Band:
        """The curve of the node."""
        steps = zip(self.low, self.mid, self.weight, self.high, strict=True)
        return [
            Point(low * scale, mid / weight * scale, high * scale) if weight > 0 else None
            for low, mid, weight, high in steps
        ]


def _largest(curve: Curve) -> float:
    return max((point.high for point in curve.all if point), default=0.0)


def middles(band: Band) -> list[float | None]:
    """The line of a curve."""
    return [point and point.mid for point in band]


def _extremes(values: list[Any]) -> tuple[float, float, float] | None:
    """The smallest, middle and largest value; None if none is known. Called half a million times for a large run."""
    try:
        ordered = sorted(values) if len(values) > 1 else values
        low, high = ordered[0] + 0.0, ordered[-1] + 0.0
        middle = (ordered[len(ordered) >> 1] + ordered[~(len(ordered) >> 1)]) / 2
    except (TypeError, OverflowError, IndexError):  # Unknown values.
        low = high = middle = math.inf
    if -_HUGE < low <= high < _HUGE:
        return low, middle, high
    known = sorted(value for value in values if _is_value(value))
    return (known[0], known[len(known) // 2], known[-1]) if known else None


def _is_value(value: object) -> bool:
    return type(value) in (int, float) and -_HUGE < value < _HUGE  # type: ignore[operator]


class _Node:
    """One file: what it is about, and its sums by quantity.

    Attributes:
        has_moved: it had other ranks in another attempt.
        damaged: lines that could not be read.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.host = file, file.stem
        self.ranks: list[int] = []
        self.gpus: list[int] = []
        self.sums: dict[str, _Sums] = {}
        self.clocks: NodeClocks = {}
        self.has_moved, self.damaged = False, 0

    def name(self, quantity: Quantity, column: int) -> str:
        """What a column of this quantity is about."""
        if quantity.part == "w":
            if self.has_moved or column >= len(self.ranks):
                return f"local rank {column} on {self.host}"
            return f"rank {self.ranks[column]} on {self.host}"
        if quantity.part == "g":
            return f"GPU {self.gpus[column] if column < len(self.gpus) else column} of {self.host}"
        return self.host


def of_run(files: Sequence[Path], whole: Span, steps: int) -> Usage:
    """The curves that have samples, over ``steps`` equal steps of the run, and the GPUs with lowered clocks."""
    nodes = [_node(file, whole, steps, reads_all=len(files) <= MAX_WHOLE) for file in files]
    _tell_apart(nodes)
    titles = {title for node in nodes for title in node.sums}
    drawn = [_curve(quantity, nodes, steps) for quantity in _DRAWN if quantity.title in titles]
    found = [each for each in drawn if _largest(each) > each.quantity.least]
    _add_values(found, nodes, whole, steps)
    lowered = by_reason([(node.host, node.gpus, node.clocks) for node in nodes], steps)
    return Usage(found, lowered, {node.host for node in nodes if node.sums}, sum(node.damaged for node in nodes))


def _tell_apart(nodes: Sequence[_Node]) -> None:
    """Nodes that share a host are named after their launcher's folder; if they share that too, after their files."""
    hosts = Counter(node.host for node in nodes)
    folders = Counter(node.file.parent.parent for node in nodes)
    for node in nodes:
        folder = node.file.parent.parent
        if hosts[node.host] > 1:
            name = line(folder.name, 64)
            is_only = folders[folder] == 1
            node.host = name if is_only else f"{node.host} ({name} {node.file.stem})"


def _one_of_each_step(whole: Span, steps: int) -> Callable[[bytes], bool]:
    """Returns a function: is this line the first sample of its step, or no sample? Lines are not decoded for it."""
    begun: set[int] = set()
    start, steps_per_s = whole.start, steps / max(whole.length, 1e-3)

    def is_wanted(text: bytes) -> bool:
        found = _TIME.match(text)
        step = int((float(found[1]) - start) * steps_per_s) if found else -1
        is_new = step not in begun or not found
        begun.add(step)
        return is_new

    return is_wanted


def _node(file: Path, whole: Span, steps: int, *, reads_all: bool = True) -> _Node:
    node, samples = _Node(file), 0
    for body in run_json.lines(file, is_wanted=None if reads_all else _one_of_each_step(whole, steps)):
        if body is None:
            node.damaged += 1
        elif "ranks" in body:
            before, node.ranks = node.ranks, integers(body, "ranks")[:_MAX_COLUMNS]
            node.has_moved = node.has_moved or before not in ([], node.ranks)
        elif "host" in body:
            node.host = line(run_json.text(body, "host"), 64) or file.stem
            node.gpus = [integer(gpu, "index") or 0 for gpu in dicts(body, "gpus")][:_MAX_COLUMNS]
        elif within := _steps(body, whole, steps):
            samples += 1
            is_counted = samples % _EACH == 0 or (samples < _MANY if reads_all else samples == 1)
            for quantity, values in _values(body):
                sums = node.sums.get(quantity.title) or node.sums.setdefault(quantity.title, _Sums(steps))
                sums.add(within[0], values, within[1], is_counted=is_counted)
            add(node.clocks, body, *within)
    return node


def _steps(body: Json, whole: Span, steps: int) -> tuple[range, float] | None:
    """The steps into which a sample falls, and how long it lasted; None if it is no sample of this run."""
    end, length = body.get("t"), body.get("s", 2.0)
    if end is None or not _is_value(end) or not _is_value(length) or not 0 <= length <= 1e6:
        return None
    step_s = max(whole.length, 1e-3) / steps
    first, last = int((end - length - whole.start) / step_s), int((end - whole.start) / step_s)
    if last < 0 or first >= steps:
        return None
    return range(max(0, first), min(steps - 1, last) + 1), max(length, 1e-3)


def _values(body: Json) -> Iterator[tuple[Quantity, list[Any]]]:
    for name, quantities in _PARTS.items():
        part = body.get(name)
        if isinstance(part, dict):
            for key, quantity in quantities:
                value = part.get(key)
                values = value[:_MAX_COLUMNS] if isinstance(value, list) else [value] if value is not None else []
                if values:
                    yield quantity, values


def _curve(quantity: Quantity, nodes: list[_Node], steps: int) -> Curve:
    used = [(node.sums[quantity.title], node) for node in nodes if quantity.title in node.sums]
    has_bands = len(nodes) <= MAX_NODES_WITH_DATA
    by_name = {node.host: sums.band(quantity.scale) for sums, node in used} if has_bands else {}
    curve = Curve(quantity, [None] * steps, by_name, _outliers(quantity, nodes), [""] * steps, [""] * steps)
    columns = ("low", "high", "mid", "weight")
    of_nodes = (zip(*(getattr(sums, name) for sums, _ in used), strict=True) for name in columns)
    for step, (lows, highs, mids, weights) in enumerate(zip(*of_nodes, strict=True)):
        middles = [mid / weight for mid, weight in zip(mids, weights, strict=True) if weight > 0]
        if middles:
            low, high = min(lows), max(highs)
            curve.all[step] = Point(*(value * quantity.scale for value in (low, median(middles), high)))
            (of_low, lowest), (of_high, highest) = used[lows.index(low)], used[highs.index(high)]
            curve.low_of[step] = lowest.name(quantity, of_low.low_of[step])
            curve.high_of[step] = highest.name(quantity, of_high.high_of[step])
    return curve


def _outliers(quantity: Quantity, nodes: list[_Node]) -> list[Outlier]:
    """The columns whose mean over the run is far from that of the others, the furthest first."""
    means = [
        (total / weight * quantity.scale, index, column)
        for index, node in enumerate(nodes)
        if quantity.title in node.sums
        for column, (total, weight) in enumerate(
            zip(node.sums[quantity.title].totals, node.sums[quantity.title].weights, strict=True)
        )
        if weight > 0
    ]
    if len(means) < _MIN_ALIKE:
        return []
    usual = median(mean for mean, _, _ in means)
    distance = median(abs(mean - usual) for mean, _, _ in means)
    far = sorted(
        (
            each
            for each in means
            if abs(each[0] - usual) > max(_SPREADS * distance, _FAR * abs(usual), quantity.least, 1e-6)
        ),
        key=lambda each: -abs(each[0] - usual),
    )
    return [
        Outlier(nodes[index].name(quantity, column), mean, usual, index, column)
        for mean, index, column in far[:_MAX_OUTLIERS]
    ]


def _add_values(found: list[Curve], nodes: list[_Node], whole: Span, steps: int) -> None:
    """Read the files of the outliers again, for their own curves."""
    wanted = grouped((outlier.node, (curve.quantity, outlier)) for curve in found for outlier in curve.outliers)
    for index, outliers in wanted.items():
        sums = [(quantity, outlier, _Sums(steps)) for quantity, outlier in outliers]
        for body in run_json.lines(nodes[index].file):
            if body and (within := _steps(body, whole, steps)):
                values = dict(_values(body))
                for quantity, outlier, each in sums:
                    each.add(within[0], values.get(quantity, [])[outlier.column : outlier.column + 1], within[1])
        for quantity, outlier, each in sums:
            outlier.values = middles(each.band(quantity.scale))
