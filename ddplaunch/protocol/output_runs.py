"""The bytes that follow an ``Output``: whose they are, and how many lines. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.protocol.launcher_agent import Output
    from ddplaunch.protocol.results import StreamName


def check_runs(header: Output, data: bytes) -> None:
    """Raises ValueError if the runs do not add up to ``data``, or lines are lost before them or continue in them."""
    if not header.runs:
        return
    if sum(header.runs) != len(data) or 0 in header.runs or header.lost_lines or header.goes_on:
        raise ValueError("the runs of an output are not those of its bytes")


def runs_of(header: Output, data: bytes) -> Iterable[tuple[Output, bytes]]:
    """The output of each stream, in order, with a header of its own; two runs of a stream share one."""
    if not header.runs:
        return ((header, data),)
    other: StreamName = "stderr" if header.stream == "stdout" else "stdout"
    headers = itertools.cycle((replace(header, runs=()), replace(header, runs=(), stream=other)))
    ends = itertools.accumulate(header.runs)
    return [(each, data[end - size : end]) for each, size, end in zip(headers, header.runs, ends, strict=False)]


def by_stream(header: Output, data: bytes) -> Iterable[tuple[Output, bytes]]:
    """The output of each stream, in one piece."""
    if not header.runs:
        return ((header, data),)
    together: dict[str, tuple[Output, list[bytes]]] = {}
    for each, run in runs_of(header, data):
        together.setdefault(each.stream, (each, []))[1].append(run)
    return [(each, b"".join(runs)) for each, runs in together.values()]


def count_lost(header: Output, data: bytes, before: int = 0) -> int:
    """Number of lines that are lost with ``data``, which follows ``header``, and right before it.

    ``before`` were lost since the last bytes of this stream that were passed on, ``header.lost_lines`` are added. A
    line counts once, also if several pieces of it are lost one after the other; an unfinished one counts. A newline
    alone does not count if its line was passed on: ``print`` of ``python -u`` writes a line and its newline by two
    calls, and where time passes between them they are two pieces of output.
    """
    lost = before + header.lost_lines
    if not data:
        return lost
    has_counted = header.goes_on and (lost > 0 or data.startswith(b"\n"))
    return lost + data.count(b"\n") + (not data.endswith(b"\n")) - has_counted
