"""``--ps RUN_ID``: what the ranks of a run use, in a table that follows the run on a terminal.

Runs in the process that the user started. Reads the run folder only: the launcher is not asked, and may be stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ddplaunch.features.runs import run_json
from ddplaunch.features.runs.run_folders import RunFolder, find
from ddplaunch.features.runs.run_json import Json, integer, number
from ddplaunch.features.usage.quantities import BY_NAME, FOLDER, Quantity
from ddplaunch.features.usage.records import PERIOD_S
from ddplaunch.system.files import kept_files
from ddplaunch.text import elapsed, escape, fold_ints, grouped, plural, size, table

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.cli.commands import Request

_MAX_EVENT_BYTES = 32 << 20
_MAX_BYTES = 64 << 20
_MAX_ROWS = 1 << 16
_LEAST_ROWS = 4

STALE_S = 45.0
"""A node without a sample for so long is not known to run: samples come every 10 s, and are written 10 s later."""


_COLUMNS = [BY_NAME[name] for name in ("w.quiet", "w.cpu", "w.rss", "g.util", "g.mem", "w.lines")]
_HEAD = ("node", "state", *(column.head for column in _COLUMNS))


def live(request: Request) -> None:
    """Show the run's table: once, or on a terminal every 2 s until the run ends or the user leaves with Ctrl-C.

    Raises:
        UsageError: there is no such run.
        LaunchError: it keeps no files.
    """
    run = find("--ps", request.value, request.log_dir)
    table = _Table(run)
    with contextlib.suppress(KeyboardInterrupt):
        if os.isatty(1) and run.is_running():
            table.follow()
        request.show(table.ended() if not run.is_running() else "\n".join(table.lines(None, None)))


class _Table:
    """The table of one run."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._known: dict[Path, NodeSamples] = {}
        self._started_s = run_json.seconds(run.started.start) or time.time()

    def lines(self, columns: int | None, rows: int | None) -> list[str]:
        """The table of now, for a terminal of this size; None: all ranks, in lines of any length."""
        now = time.time()
        folders = self._run.of_all_launchers()  # A launcher may have joined.
        nodes = files(folders, self._known)
        lines = ranks(nodes, _failed(folders, newest_attempt(nodes)), now)
        shown = rank_table(lines) if lines else []
        if rows is not None and len(shown) > rows - 2:
            shown = node_table(lines)
            hidden = len(shown) - max(rows - 3, _LEAST_ROWS)
            shown = [*shown[:-hidden], f"... and {hidden} more nodes"] if hidden > 0 else shown
        head = title(self._run.run_id, max(0.0, now - self._started_s), nodes, lines, now)
        head += _of_events(folders, now)
        return [escape(line)[:columns] for line in (head, *shown)]

    def follow(self) -> None:
        """Show the table in the same place until the run ends."""
        shown = 0
        while True:
            size = os.get_terminal_size(1)
            lines = self.lines(size.columns or None, size.lines or None)
            up = f"\x1b[{shown}F" if shown else ""
            sys.stdout.write(up + "".join(f"\x1b[K{line}\n" for line in lines) + "\x1b[J")
            sys.stdout.flush()
            shown = len(lines)
            due = time.monotonic() + PERIOD_S
            while time.monotonic() < due:
                if not self._run.is_running():
                    return
                time.sleep(PERIOD_S / 8)

    def ended(self) -> str:
        """How a run has ended, and where its files are."""
        if problem := self._run.unknown():
            there = f"ssh -t {self._run.other_host} ddplaunch --ps {self._run.run_id}"
            return f"{self._run.run_id}: {problem}; there: {there}"
        from ddplaunch.features.come_back import past_runs

        found = past_runs.of_launchers(self._run.of_all_launchers())
        took = f" after {elapsed(found.duration_s)}" if found.duration_s is not None else ""
        lines = [f"{self._run.run_id}: ended{took}: {found.result}", *([found.cause] if found.cause else [])]
        return "\n".join((*lines, f"its files: {self._run.name}"))


def _failed(folders: Iterable[Path], attempt: int | None) -> frozenset[int]:
    """The ranks that have failed in ``attempt``, as far as the launchers have written it."""
    found = (run_json.lines(folder / run_json.EVENTS, b'"worker_failed"', _MAX_EVENT_BYTES) for folder in folders)
    failed = [
        integer(event, "rank") for events in found for event in events if event and event.get("attempt") == attempt
    ]
    return frozenset(rank for rank in failed if rank is not None)


def _of_events(folders: Iterable[Path], now: float) -> str:
    """How much time is left, and how old the newest checkpoint is, if the launchers have noted it."""
    paths = (folder / run_json.EVENTS for folder in folders)
    found = (run_json.lines(path, b"_t", _MAX_EVENT_BYTES, _says_end_or_checkpoint) for path in paths)
    events = [event for each in found for event in each if event]
    end_s, saved = run_json.job_end(events), run_json.checkpoint(events)
    left = "" if end_s is None else f"; {elapsed(max(0.0, end_s - now))} left"
    return left + (f"; {saved[0]} saved {elapsed(max(0.0, now - saved[1]))} ago" if saved else "")


def _says_end_or_checkpoint(line: bytes) -> bool:
    return b'"end_t"' in line or b'"saved_t"' in line


# The table.


class RankLine(NamedTuple):
    """One rank; ``values`` are in the order of ``_COLUMNS``, None if not known."""

    rank: int
    host: str
    state: str
    values: tuple[float | None, ...]


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
    found = [(column.part, numbers(sample, column)) for column in _COLUMNS]
    memory = numbers(sample, BY_NAME["w.rss"])
    lines = []
    for at, rank in enumerate(rank_list if isinstance(rank_list, list) else ()):
        if type(rank) is not int:
            continue
        row = rows[at] if isinstance(rows, list) and at < len(rows) else None
        has_ended = bool(of(sample, "w")) and _at(memory, at) is None
        state = "failed" if rank in failed else "ended" if has_ended else "no sample" if age_s > STALE_S else "running"
        values = tuple(_at(column, row if part == "g" else at) for part, column in found)
        lines.append(RankLine(rank, host, state, values))
    return lines


def _at(values: Sequence[float | None], row: object) -> float | None:
    return values[row] if type(row) is int and 0 <= row < len(values) else None


def rank_table(lines: Sequence[RankLine]) -> list[str]:
    """A line for each rank, below a head."""
    return table([("rank", *_HEAD), *(_row(str(line.rank), line) for line in lines)])


def node_table(lines: Sequence[RankLine]) -> list[str]:
    """A line for each node: sums of memory and lines, the mean of GPUs, the longest silence."""
    by_host = grouped((line.host, line) for line in lines)
    rows = [_row(fold_ints(line.rank for line in group), _summed(group)) for group in by_host.values()]
    return table([("ranks", *_HEAD), *rows])


def _summed(group: Sequence[RankLine]) -> RankLine:
    states = {line.state: sum(each.state == line.state for each in group) for line in group}
    state = ", ".join(f"{count} {name}" for name, count in states.items()) if len(states) > 1 else next(iter(states))
    columns = zip(*(line.values for line in group), strict=True)
    known = [[value for value in values if value is not None] for values in columns]
    values = tuple(_of_several(column, found) if found else None for column, found in zip(_COLUMNS, known, strict=True))
    return RankLine(group[0].rank, group[0].host, state, values)


def _of_several(quantity: Quantity, values: Sequence[float]) -> float:
    """Of a node with several ranks. The share of a whole, and a time, are not summed up."""
    if quantity.unit == "s":
        return max(values)
    return sum(values) / (len(values) if quantity.top else 1)


def _row(name: str, line: RankLine) -> tuple[str, ...]:
    pairs = zip(_COLUMNS, line.values, strict=True)
    values = ["-" if value is None else _text(column, value) for column, value in pairs]
    return name, line.host, line.state, *values


def _text(quantity: Quantity, value: float) -> str:
    if quantity.unit == "bytes":
        return size(value)
    if quantity.unit == "s":
        return f"{elapsed(value)} ago"
    return f"{value:.0f} %" if quantity.is_percent else f"{value:.3g}"


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


# The newest usage sample of each node, from the files that the launchers write. A file may be cut off anywhere,
# damaged, or of another version: what is no number is unknown, and a line that is not whole is passed over.


class NodeSamples:
    """The file of one node, as far as it has been read.

    Attributes:
        head: its first line; empty until there is one.
        start: the line of the newest attempt; empty until there is one.
        newest: the newest sample of that attempt; empty until there is one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.head: Json = {}
        self.start: Json = {}
        self.newest: Json = {}
        self._inode = self._offset = 0

    def refresh(self) -> None:
        """Read what has been written since the last call: all, if the file was written anew. Does not raise."""
        with contextlib.suppress(OSError), kept_files.open_regular(self._path) as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            data = file.read(_MAX_BYTES)
            whole = data.rfind(b"\n") + 1
            self._offset += whole
            self._take(data[:whole].splitlines())

    def _take(self, lines: Iterable[bytes]) -> None:
        """Only lines that matter are parsed: the file of a day has hundreds."""
        last = b""
        for line in lines:
            if line.startswith(b'{"schema"'):
                self.head = _object(line) or self.head
            elif line.startswith(b'{"attempt"'):
                start = _object(line)
                if start.get("attempt") != self.start.get("attempt"):
                    self.newest, last = {}, b""
                self.start = start or self.start
            else:
                last = line
        if last:
            self.newest = _object(last) or self.newest


def _object(line: bytes) -> Json:
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(line)
        return body if isinstance(body, dict) else {}
    return {}


def files(launcher_folders: Iterable[Path], known: dict[Path, NodeSamples]) -> list[NodeSamples]:
    """The files of all nodes, read up to now; those that are ``known`` go on where they were."""
    for folder in launcher_folders:
        with contextlib.suppress(OSError):
            for path in sorted((folder / FOLDER).iterdir()):
                if path.suffix == ".jsonl" and path not in known:
                    known[path] = NodeSamples(path)
    for samples in known.values():
        samples.refresh()
    return list(known.values())


def numbers(body: Json, quantity: Quantity) -> list[float | None]:
    """The values of ``quantity`` in a sample, in their order; empty if there are none."""
    values = of(body, quantity.part).get(quantity.key)
    return [run_json.finite(value) for value in values[:_MAX_ROWS]] if isinstance(values, list) else []


def of(body: Json, part: str) -> Json:
    """A part of a sample; empty if there is none."""
    found = body.get(part)
    return found if isinstance(found, dict) else {}
