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


def pieces(data: bytes, time_ns: int) -> tuple[list[tuple[int, bytes]], bytes]:
    """What was written at which time, without the marks, and the beginning of a mark at the end of ``data``.

    ``time_ns`` is that of what stands before the first mark.
    """
    if _MAGIC[0] not in data:
        return [(time_ns, data)], b""
    first, *marked = _MARK.split(data)
    times = (_TIME.unpack(text)[0] for text in marked[::2])
    found = [(time_ns, first), *zip(times, marked[1::2], strict=True)]
    time_ns, last = found.pop()
    rest = _begun_mark(last)
    found.append((time_ns, last[: len(last) - len(rest)]))
    return [(time_ns, part) for time_ns, part in found if part], rest


def _begun_mark(data: bytes) -> bytes:
    """The end of ``data`` that may be the beginning of a mark."""
    for start in range(max(0, len(data) - MARK_BYTES + 1), len(data)):
        if _MAGIC.startswith(data[start : start + len(_MAGIC)]):
            return data[start:]
    return b""
