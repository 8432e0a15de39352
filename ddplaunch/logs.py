"""How a node's log files travel to the launcher at the end of a run: the records, their limits, and safe names.

The launcher says how many bytes it wants, and says it again as it has written them: no more than ``WINDOW_BYTES`` of a
node's are on the way, so that an answer to a ping is never behind much, and nobody's memory grows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CHUNK_BYTES = 64 << 10
WINDOW_BYTES = 256 << 10
"""Two seconds of a link with 1 Mbit/s: a node is lost after five."""

MAX_FILES = 100_000
"""Of one node. Its attempts have three files for each worker."""

_NAME = re.compile(r"attempt_[0-9]{1,9}/(?:[0-9]{1,9}/)?(?![0-9]+$)(?!.*\.part$)[A-Za-z0-9_][A-Za-z0-9_.@+=-]{0,99}")


@dataclass(frozen=True)
class LogsFound:
    """All of a node's work is done and told. So much is in its log files, and waits until it is wanted."""

    files: int
    nbytes: int


@dataclass(frozen=True)
class LogsWanted:
    """The launcher takes so many bytes more, as ``cost`` counts them; 0: no more at all, the agent may end."""

    nbytes: int


@dataclass(frozen=True)
class LogChunk:
    """Header of ``nbytes`` raw bytes that follow it: the next ones of a file, which comes in one go."""

    path: str
    nbytes: int
    is_last: bool


@dataclass(frozen=True)
class LogsSent:
    """All was sent and taken, but ``left_out`` files: not readable, not ``is_safe``, or too many."""

    left_out: int


FROM_AGENT = (LogsFound, LogChunk, LogsSent)


def cost(chunk: LogChunk) -> int:
    """What a chunk takes of what is wanted; empty files are not for nothing."""
    return chunk.nbytes + 512


def is_safe(path: str) -> bool:
    """Whether ``path`` is one that an agent makes below its run folder: it leads nowhere else, and none hides another.

    ``attempt_N/NAME`` or ``attempt_N/LOCAL_RANK/NAME``. ``NAME.part`` is the launcher's, for a file that is not whole.
    """
    return bool(_NAME.fullmatch(path))
