"""The table of ``--ps RUN_ID``: one line for each rank, or for each node if ranks do not fit. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.features.usage.usage_reading import numbers, of
from ddplaunch.late_dataclass import dataclass
from ddplaunch.system.files.run_json import number
from ddplaunch.text import elapsed, fold_ints, plural, size, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.features.usage.usage_reading import NodeSamples

STALE_S = 45.0
"""A node without a sample for so long is not known to run: samples come every 10 s, and are written 10 s later."""

_HEAD = ("rank", "node", "state", "last line", "CPU", "memory", "GPU", "GPU memory", "lines/s")
_NODE_HEAD = ("ranks", "node", "state", "last line", "CPU", "memory", "GPU", "GPU memory", "lines/s")


@dataclass(frozen=True)
class RankLine:
    """One rank. None: not known.

    Attributes:
        cpu: percent of one CPU.
        gpu: percent of the time in which a kernel ran.
    """

    rank: int
    host: str
    state: str
    quiet_s: float | None = None
    cpu: float | None = None
    rss: float | None = None
    gpu: float | None = None
    gpu_memory: float | None = None
    lines: float | None = None


def ranks(nodes: Sequence[NodeSamples], failed: frozenset[int], now: float) -> list[RankLine]:
    """All ranks of the newest attempt, in order. ``failed`` are those that have failed in it."""
    attempt = newest_attempt(nodes)
    found = [rank for node in nodes if node.start.get("attempt") == attempt for rank in _of_node(node, failed, now)]
    return sorted(found, key=lambda line: line.rank)


def newest_attempt(nodes: Sequence[NodeSamples]) -> int | None:
    """The number of the newest attempt that has a sample file's line; None if there is none."""
    known = [attempt for node in nodes if isinstance(attempt := node.start.get("attempt"), int)]
    return max(known, default=None)


def _of_node(node: NodeSamples, failed: frozenset[int], now: float) -> list[RankLine]:
    rank_list, rows = node.start.get("ranks"), node.start.get("gpu")
    host, sample = str(node.head.get("host", "?")), node.newest
    age_s = now - (number(sample, "t") or number(node.start, "t") or 0.0)
    quiet, cpu, rss, rates = (numbers(sample, "w", key) for key in ("quiet", "cpu", "rss", "lines"))
    util, gpu_memory = (numbers(sample, "g", key) for key in ("util", "mem"))
    lines = []
    for at, rank in enumerate(rank_list if isinstance(rank_list, list) else ()):
        if type(rank) is not int:
            continue
        row = rows[at] if isinstance(rows, list) and at < len(rows) else None
        has_ended = bool(of(sample, "w")) and _at(rss, at) is None
        state = "failed" if rank in failed else "ended" if has_ended else "no sample" if age_s > STALE_S else "running"
        of_worker = (_at(quiet, at), _at(cpu, at), _at(rss, at))
        lines.append(RankLine(rank, host, state, *of_worker, _at(util, row), _at(gpu_memory, row), _at(rates, at)))
    return lines


def _at(values: Sequence[float | None], row: object) -> float | None:
    return values[row] if type(row) is int and 0 <= row < len(values) else None


def rank_table(lines: Sequence[RankLine]) -> list[str]:
    """A line for each rank, below a head."""
    return table([_HEAD, *(_row(str(line.rank), line) for line in lines)])


def node_table(lines: Sequence[RankLine]) -> list[str]:
    """A line for each node: sums of memory and lines, the mean of GPUs, the longest silence."""
    by_host: dict[str, list[RankLine]] = {}
    for line in lines:
        by_host.setdefault(line.host, []).append(line)
    rows = [_row(fold_ints(line.rank for line in group), _summed(group)) for group in by_host.values()]
    return table([_NODE_HEAD, *rows])


def _summed(group: Sequence[RankLine]) -> RankLine:
    states = {line.state: sum(each.state == line.state for each in group) for line in group}
    state = ", ".join(f"{count} {name}" for name, count in states.items()) if len(states) > 1 else next(iter(states))
    return RankLine(
        group[0].rank,
        group[0].host,
        state,
        _over(max, group, lambda line: line.quiet_s),
        _over(sum, group, lambda line: line.cpu),
        _over(sum, group, lambda line: line.rss),
        _over(lambda values: sum(values) / len(values), group, lambda line: line.gpu),
        _over(sum, group, lambda line: line.gpu_memory),
        _over(sum, group, lambda line: line.lines),
    )


def _over(
    merge: Callable[[list[float]], float], group: Sequence[RankLine], value_of: Callable[[RankLine], float | None]
) -> float | None:
    known = [value for line in group if (value := value_of(line)) is not None]
    return merge(known) if known else None


def _row(name: str, line: RankLine) -> tuple[str, ...]:
    quiet = "-" if line.quiet_s is None else f"{elapsed(line.quiet_s)} ago"
    percents = [f"{value:.0f} %" if value is not None else "-" for value in (line.cpu, line.gpu)]
    sizes = [size(value) if value is not None else "-" for value in (line.rss, line.gpu_memory)]
    lines = "-" if line.lines is None else f"{line.lines:.3g}"
    return name, line.host, line.state, quiet, percents[0], sizes[0], percents[1], sizes[1], lines


def title(run_id: str, running_s: float, nodes: Sequence[NodeSamples], lines: Sequence[RankLine], now: float) -> str:
    """What the table is about."""
    text = f"{run_id}: running for {elapsed(running_s)}"
    attempt = newest_attempt(nodes)
    if attempt is None:
        return f"{text}; no usage sample yet"
    hosts = len({line.host for line in lines})
    times = [t for node in nodes if (t := number(node.newest, "t")) is not None]
    text += f", attempt {attempt}, {plural(len(lines), 'rank')} on {plural(hosts, 'node')}"
    return f"{text}; as of {elapsed(now - max(times))} ago" if times else f"{text}; no usage sample yet"
