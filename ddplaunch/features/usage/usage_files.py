"""The usage samples of all nodes of this launcher, in the files samples/node_K.jsonl of the run folder.

``UsageFiles`` receives them in the launcher's main thread, and gives them its own time. A thread writes the files,
because a slow disk must not delay the loop; older samples are thinned out. If a disk is full, samples are missing in a
file. The next time that the thread writes the whole file, it has all samples that are kept. docs/samples.md has the
format.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from ddplaunch.features.usage.quantities import FOLDER, QUANTITIES
from ddplaunch.features.usage.records import UsageSample, UsageSampled, UsageStarted, mean
from ddplaunch.system.files import kept_files
from ddplaunch.system.files.kept_files import keep_free
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.features.usage import UsageRecord
    from ddplaunch.launcher.watches import RunServices

SCHEMA = 1

LEVELS = ((180.0, 30.0), (3600.0, 600.0), (86400.0, 1800.0))
"""From this age in seconds on, one sample for so many seconds."""

_THIN_S = 120.0
"""Between two whole files of a node; meanwhile samples are appended."""

_MAX_ROWS = 4000
"""Of one node. The oldest are left out: of a run that restarts all day, or goes on for months."""

_FLUSH_S = 1.0
_CLOSE_S = 2.0
_MAX_QUEUED = 10_000
"""Records that wait for a disk, of some kB each."""

_MAX_REASON = 80
_FOUR_DIGITS = {each.name for each in QUANTITIES if each.unit == "bytes"}

_MAX_DRIFT = 1e-3
"""By which two clocks may differ in their speed."""

_MAX_AGE_S = 86400.0


class Row(NamedTuple):
    """A sample as its line; ``t`` is its end in seconds since 1970, ``s`` its span. 0: the start of an attempt."""

    attempt: int
    t: float
    s: float
    line: str


def row(attempt: int, t: float, sample: UsageSample) -> Row:
    """The line of a sample that ended at ``t``."""
    parts: dict[str, list[str]] = {}
    for name, values in sample.values.items():
        part, _, key = name.partition(".")
        digits = 4 if name in _FOUR_DIGITS else 3
        found = ["null" if value is None else number(value, digits) for value in values]
        value = next(iter(found), "null") if part == "n" else f"[{','.join(found)}]"
        parts.setdefault(part, []).append(f'"{key}":{value}')
    if sample.throttle:
        reasons = json.dumps([reason and reason[:_MAX_REASON] for reason in sample.throttle])
        parts.setdefault("g", []).append(f'"throttle":{reasons}')
    objects = (f'"{part}":{{{",".join(items)}}}' for part, items in parts.items())
    line = ",".join((f'"t":{t:.1f},"s":{sample.span_s:.3g}', *objects))
    return Row(attempt, t, sample.span_s, f"{{{line}}}")


def number(value: float, digits: int) -> str:
    """The shortest JSON of a number with so many digits."""
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    if not exponent:
        return mantissa
    short, long = f"{mantissa}e{int(exponent)}", f"{float(f'{mantissa}e{exponent}'):.0f}"
    return long if len(long) <= len(short) and int(exponent) > 0 else short


def thinned(rows: Sequence[Row], now: float) -> list[Row]:
    """``rows``, in their order, with those of each level merged; no merged row spans two attempts."""
    kept = list(rows)
    for age_s, period_s in LEVELS:
        spans = groupby(kept, partial(_span_of, before=now - age_s, period_s=period_s))
        kept = [merged for key, group in spans for merged in _merged(key, list(group))]
    return kept


def _span_of(each: Row, *, before: float, period_s: float) -> tuple[int, int] | None:
    """The attempt and span in which a row is merged; None for one that stays."""
    span = int(each.t // period_s)
    return (each.attempt, span) if each.s and (span + 1) * period_s <= before else None


def _merged(key: tuple[int, int] | None, rows: list[Row]) -> Iterable[Row]:
    return rows if key is None or len(rows) == 1 else (row(key[0], rows[-1].t, mean([_sample(each) for each in rows])),)


def _newest(rows: list[Row]) -> list[Row]:
    """At most ``_MAX_ROWS``, and the start of their first attempt."""
    kept = rows[-_MAX_ROWS:]
    start = next((each for each in reversed(rows[:-_MAX_ROWS]) if not each.s), None)
    return [start, *kept] if start and kept[0].s else kept


def _sample(each: Row) -> UsageSample:
    """The sample of a line that ``row`` has made."""
    body = json.loads(each.line)
    throttle = body.get("g", {}).pop("throttle", ())
    values = {
        f"{part}.{key}": tuple(found) if isinstance(found, list) else (found,)
        for part in ("n", "w", "g")
        for key, found in body.get(part, {}).items()
    }
    return UsageSample(at_s=each.t, span_s=each.s, values=values, throttle=tuple(throttle))


class NodeFile:
    """The file of one node, and what it is to hold.

    Attributes:
        head: the first line.
        rows: starts of attempts and the samples that are kept, as they came: the clock may be set back.
    """

    def __init__(self, name: str) -> None:
        self._name, self.head = name, ""
        self.rows: list[Row] = []
        self._pending: list[Row] = []
        self._whole_at: float | None = None
        self._path: Path | None = None

    def add(self, rows: Sequence[Row]) -> None:
        self.rows.extend(rows)
        self._pending.extend(rows)

    def flush(self, folder: Path, now: float) -> None:
        """Append what is new; or write the whole file, if it is time or the last write has failed. Does not raise."""
        path = folder / FOLDER / self._name
        age_s = -1.0 if self._whole_at is None else now - self._whole_at  # Below 0 also when the clock was set back.
        is_whole_due = not 0.0 <= age_s < _THIN_S or path != self._path
        if is_whole_due:
            self.rows = _newest(thinned(self.rows, now))
        self._path = path
        pending, self._pending = self._pending, []
        whole_at, self._whole_at = self._whole_at, None
        with kept_files.noting(path):
            if is_whole_due:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                text = self.text()
                keep_free(path.parent, len(text))
                kept_files.write_whole(path, text)
            elif pending:
                _append(path, "".join(f"{each.line}\n" for each in pending))
            self._whole_at = now if is_whole_due else whole_at

    def text(self) -> str:
        """The whole file."""
        return "".join(f"{line}\n" for line in (self.head, *(each.line for each in self.rows)))


def _append(path: Path, text: str) -> None:
    """Raises OSError, perhaps after a part of the text."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        data = text.encode()
        keep_free(fd, len(data))
        if os.write(fd, data) < len(data):
            raise OSError("a line was cut")
    finally:
        kept_files.close(fd)


class UsageFiles:
    """All files of a run, and the thread that writes them. ``close`` may be called without it."""

    def __init__(self, run: RunServices) -> None:
        """The folder of the run may move."""
        self._is_local, self._nodes, self._folder = run.config.is_local, run.nodes, run.folder
        self._clocks: dict[int, Clock] = {}
        self._attempts: dict[int, int] = {}
        """The newest of each node."""
        self._queue: queue.Queue[tuple[int, str, list[Row]] | None] = queue.Queue(_MAX_QUEUED)
        self._files: dict[int, NodeFile] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def on_event(self, index: int, event: UsageRecord) -> None:
        """A record of node ``index``."""
        match event:
            case UsageStarted(attempt=attempt):
                self._attempts[index] = attempt
                t = self._time_s(index, event.at_s)
                start = {"attempt": attempt, "t": round(t, 1), "ranks": event.ranks, "gpu": event.gpu_of_worker}
                line = json.dumps(start, separators=(",", ":"))
                self._put(index, [Row(attempt, t, 0.0, line)], _head(index, self._nodes.all[index].host, event))
            case UsageSampled(attempt=attempt) if attempt == self._attempts.get(index):
                times = [self._time_s(index, sample.at_s) for sample in event.samples]
                self._put(index, [row(attempt, t, sample) for t, sample in zip(times, event.samples, strict=True)])

    def _time_s(self, index: int, at_s: float) -> float:
        """A time of an agent's ``time.monotonic()`` in seconds since 1970, by this machine's clock."""
        now = time.monotonic()
        ours = at_s if self._is_local else self._clocks.setdefault(index, Clock()).ours(at_s, now)
        return time.time() - min(max(now - ours, 0.0), _MAX_AGE_S)

    def _put(self, index: int, rows: list[Row], head: str = "") -> None:
        """Write rows of the node ``index`` soon; with ``head``, the first line of its file, they start an attempt."""
        with contextlib.suppress(queue.Full, RuntimeError):  # A disk that hangs; the limit of threads.
            if self._thread is None:
                self._thread = in_thread("samples", self._run)
            self._queue.put_nowait((index, head, rows))

    def close(self) -> None:
        """Write what is left, within ``_CLOSE_S``."""
        if self._thread:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._closing.set()
            self._thread.join(_CLOSE_S)

    # In the thread.

    def _run(self) -> None:
        is_open = True
        while is_open:
            items = [self._queue.get()]
            self._closing.wait(_FLUSH_S)  # What comes meanwhile is written with it.
            while not self._queue.empty():
                items.append(self._queue.get())
            is_open = None not in items
            self._flush({self._add(*item) for item in items if item})

    def _add(self, index: int, head: str, rows: list[Row]) -> int:
        file = self._files.setdefault(index, NodeFile(f"node_{index}.jsonl"))
        file.head = file.head or head
        file.add(rows)
        return index

    def _flush(self, changed: Iterable[int]) -> None:
        if folder := self._folder():
            for index in changed:
                self._files[index].flush(folder, time.time())


def _head(index: int, host: str, event: UsageStarted) -> str:
    gpus = [{"index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "memory": gpu.memory_bytes} for gpu in event.gpus]
    head = {"schema": SCHEMA, "node": index, "host": host, "cpus": event.cpus, "memory": event.memory_bytes}
    return json.dumps({**head, "gpus": gpus}, separators=(",", ":"))


class Clock:
    """Converts times of another machine's ``time.monotonic()`` into ours, by the record that was fastest.

    Clocks of two machines are not compared: a record cannot arrive before it was sent, so that the smallest difference
    seen is the best. It may grow slowly, since clocks drift.
    """

    def __init__(self) -> None:
        self._offset_s, self._at = math.inf, 0.0

    def ours(self, theirs: float, now: float) -> float:
        """Our time at ``theirs``; ``now`` is ours when the record arrived."""
        drifted = self._offset_s + _MAX_DRIFT * (now - self._at)
        self._offset_s, self._at = min(now - theirs, drifted), now
        return theirs + self._offset_s
