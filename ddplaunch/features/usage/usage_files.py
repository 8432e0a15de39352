"""The files samples/node_K.jsonl of the run folder: the usage samples of each node. Older samples are thinned out.

Runs in the launcher. A thread writes the files, because a slow disk must not delay the loop; it starts with the first
samples. If a disk is full, samples are missing in a file. The next time that the thread writes the whole file, it has
all samples that are kept. docs/samples.md has the format.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from dataclasses import field, fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ddplaunch.features.usage.records import GpusUsage, NodeUsage, UsageSample, WorkersUsage, mean
from ddplaunch.late_dataclass import dataclass
from ddplaunch.system.files import kept_files
from ddplaunch.system.files.free_space import keep_free

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

SCHEMA = 1
FOLDER = "samples"

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


class Row(NamedTuple):
    """A sample as its line; ``t`` is its end in seconds since 1970, ``s`` its span. 0: the start of an attempt."""

    attempt: int
    t: float
    s: float
    line: str


def row(attempt: int, t: float, sample: UsageSample) -> Row:
    """The line of a sample that ended at ``t``."""
    parts = [f'"n":{_object(sample.node)}', f'"w":{_object(sample.workers)}']
    parts += [f'"g":{_object(sample.gpus)}'] if sample.gpus else []
    return Row(attempt, t, sample.span_s, f'{{"t":{t:.1f},"s":{sample.span_s:.3g},{",".join(parts)}}}')


def _object(part: NodeUsage | WorkersUsage | GpusUsage) -> str:
    return "{" + ",".join(f'"{each.name}":{_text(each.name, getattr(part, each.name))}' for each in fields(part)) + "}"


def _text(name: str, value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ",".join(_text(name, each) for each in value) + "]"
    if isinstance(value, str):
        return json.dumps(value[:_MAX_REASON])
    return "null" if value is None else number(value, 4 if name in ("mem", "rss") else 3)


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
    gpus = {name: tuple(values) for name, values in body["g"].items()} if "g" in body else None
    return UsageSample(
        at_s=each.t,
        span_s=each.s,
        node=NodeUsage(**body["n"]),
        workers=WorkersUsage(**{name: tuple(values) for name, values in body["w"].items()}),
        gpus=GpusUsage(**gpus) if gpus else None,
    )


@dataclass
class NodeFile:
    """The file of one node, and what it is to hold.

    Attributes:
        head: the first line.
        rows: starts of attempts and the samples that are kept, as they came: the clock may be set back.
    """

    name: str
    head: str = ""
    rows: list[Row] = field(default_factory=list)
    _pending: list[Row] = field(default_factory=list)
    _whole_at: float | None = None
    _path: Path | None = None

    def add(self, rows: Sequence[Row]) -> None:
        self.rows.extend(rows)
        self._pending.extend(rows)

    def flush(self, folder: Path, now: float) -> None:
        """Append what is new; or write the whole file, if it is time or the last write has failed. Does not raise."""
        path = folder / FOLDER / self.name
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

    def __init__(self, folder: Callable[[], Path | None]) -> None:
        """``folder`` returns the run's; it may move."""
        self._folder = folder
        self._queue: queue.Queue[tuple[int, str, list[Row]] | None] = queue.Queue(_MAX_QUEUED)
        self._files: dict[int, NodeFile] = {}
        self._thread: threading.Thread | None = None

    def put(self, index: int, rows: list[Row], head: str = "") -> None:
        """Write rows of the node ``index`` soon; with ``head``, the first line of its file, they start an attempt."""
        with contextlib.suppress(queue.Full, RuntimeError):  # A disk that hangs; the limit of threads.
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="samples", daemon=True)
                thread.start()
                self._thread = thread
            self._queue.put_nowait((index, head, rows))

    def close(self) -> None:
        """Write what is left, within ``_CLOSE_S``."""
        if self._thread:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            self._thread.join(_CLOSE_S)

    # In the thread.

    def _run(self) -> None:
        is_open = True
        while is_open:
            changed: set[int] = set()
            due = time.monotonic() + _FLUSH_S
            while is_open and (wait_s := due - time.monotonic()) > 0:
                with contextlib.suppress(queue.Empty):
                    item = self._queue.get(timeout=wait_s if changed else None)
                    due = due if changed else time.monotonic() + _FLUSH_S
                    if item is None:
                        is_open = False
                    else:
                        changed.add(self._add(*item))
            self._flush(changed)

    def _add(self, index: int, head: str, rows: list[Row]) -> int:
        file = self._files.setdefault(index, NodeFile(f"node_{index}.jsonl"))
        file.head = file.head or head
        file.add(rows)
        return index

    def _flush(self, changed: Iterable[int]) -> None:
        folder = self._folder()
        for index in changed if folder else ():
            assert folder
            self._files[index].flush(folder, time.time())
