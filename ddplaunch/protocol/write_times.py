"""The times that a worker writes into its output, so that the agent knows the order of stdout and stderr.

Two pipes have no common order, and their reader sees only what each has gathered. So a worker begins what it writes to
the one stream, after the other, with a mark: ``_MAGIC``, and the time in nanoseconds of ``time.monotonic_ns``, which is
the same for all processes of a machine (clock_gettime(2), CLOCK_MONOTONIC). The agent removes the marks. Pure.
"""

from __future__ import annotations

import re
import struct

_MAGIC = bytes.fromhex("00 1b 9c 7a d1 e3 44 5f 88 b2 0c f1 e5 a6 d7 0f")
"""No text has it: a zero byte first, and bytes that are not UTF-8."""

_TIME = struct.Struct("<Q")

_MARK = re.compile(re.escape(_MAGIC) + b"(.{8})", re.DOTALL)

MARK_BYTES = len(_MAGIC) + _TIME.size


def mark(time_ns: int) -> bytes:
    """The mark that begins what is written at ``time_ns``."""
    return _MAGIC + _TIME.pack(time_ns)


def begin_of_mark(data: bytes) -> int:
    """Where a mark begins that ``data`` does not have to its end; the length of ``data`` if there is none."""
    last = data.rfind(_MAGIC)
    if last >= 0 and last + MARK_BYTES > len(data):
        return last
    behind = last + MARK_BYTES if last >= 0 else 0  # A time may end as a mark begins.
    for start in range(max(behind, len(data) - len(_MAGIC) + 1), len(data)):
        if _MAGIC.startswith(data[start:]):
            return start
    return len(data)


def pieces(data: bytes, time_ns: int) -> list[tuple[int, bytes]]:
    """What was written at which time, without the marks; ``time_ns`` is that of what stands before the first mark.

    ``data`` is all that a pipe had at one moment: it ends in no mark's middle, since a mark is written as a whole
    (pipe(7): up to PIPE_BUF bytes).
    """
    if _MAGIC not in data:
        return [(time_ns, data)]
    first, *marked = _MARK.split(data)
    times = (_TIME.unpack(text)[0] for text in marked[::2])
    found = [(time_ns, first), *zip(times, marked[1::2], strict=True)]
    return [(time_ns, part) for time_ns, part in found if part]
