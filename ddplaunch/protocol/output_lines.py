"""How many lines of a worker a piece of its output counts for, where it is dropped.

Used by agent and launcher. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.protocol.launcher_agent import Output


def count_lines(header: Output, data: bytes) -> int:
    """Number of lines in ``data``, which follows ``header``; an unfinished one counts.

    The end of a line that was sent before does not: ``print`` of ``python -u`` writes a line and its newline by two
    calls, and where time passes between them they are two pieces of output.
    """
    is_unfinished = not data.endswith(b"\n")
    return data.count(b"\n") + is_unfinished - (header.goes_on and data.startswith(b"\n")) if data else 0
