"""Transfer of a node's log files to the launcher at the end of a run: records, limits and safe file names.

Pure. The launcher (``LogCollector``) grants bytes to the agent (``after_end``), and grants more after it has written
some. At most ``WINDOW_BYTES`` of a node are in transit: that limits memory and the delay of a pong.
"""

from __future__ import annotations

import re

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, LongText, Size
from ddplaunch.protocol.wire import Chunk, ChunkSize

CHUNK_BYTES = 64 << 10
WINDOW_BYTES = 256 << 10
"""Two seconds of a link with 1 Mbit/s; a node counts as lost after five without a pong."""

MAX_FILES = 100_000
"""Limit for one node. An attempt has three files per worker."""

RESULT_FILE = "return.pkl"
"""Name of the file with the pickled value that a function has returned, in the worker's folder: it is always sent."""

_NAME = re.compile(
    r"rendezvous\.log|attempt_[0-9]{1,9}/(?:[0-9]{1,9}/)?(?![0-9]+$)(?!.*\.part$)[A-Za-z0-9_][A-Za-z0-9_.@+=-]{0,99}"
)


@dataclass(frozen=True)
class LogsFound:
    """Agent to launcher, after AgentEnded: total size of the node's log files."""

    nbytes: Size


@dataclass(frozen=True)
class GrantLogBytes:
    """Launcher to agent: send up to ``nbytes`` more, counted by ``cost``; 0: send no more files."""

    nbytes: Size


@dataclass(frozen=True)
class LogChunk(Chunk):
    """Agent to launcher: header of the next ``nbytes`` raw bytes of file ``path``. Files are not interleaved."""

    path: LongText
    nbytes: ChunkSize
    is_last: bool


@dataclass(frozen=True)
class LogsSent:
    """Agent to launcher, last: all files were sent and accepted.

    ``skipped_files`` is the number of those that are unreadable, too many, or have a name that is not ``is_safe``.
    """

    skipped_files: Count


TO_AGENT = (GrantLogBytes,)
FROM_AGENT = (LogsFound, LogChunk, LogsSent)


def cost(chunk: LogChunk) -> int:
    """Bytes of the grant that a chunk uses; an empty file uses some too."""
    return chunk.nbytes + 512


def is_safe(path: str) -> bool:
    """Whether ``path`` is below the run folder and cannot replace another file.

    It must be ``rendezvous.log``, ``attempt_N/NAME`` or ``attempt_N/LOCAL_RANK/NAME``. The launcher uses ``NAME.part``
    for a file that is not complete.
    """
    return bool(_NAME.fullmatch(path))
