"""The query of ``--logs`` to an agent without a run: a part of a log file on its node; and the agent's answer.

One part is asked for after the other, so that each side has at most one of them in memory, however long the file is and
however slowly it is printed.
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import LongText, OneLine, Size
from ddplaunch.protocol.wire import Chunk, ChunkSize
from ddplaunch.system.files import kept_files

PART_BYTES = 256 << 10


@dataclass(frozen=True)
class ReadLog:
    """Command to agent: requests a LogPart, the bytes of the file at ``path`` from ``offset`` on.

    An empty ``path`` only asks whether the agent answers.
    """

    path: LongText
    offset: Size


@dataclass(frozen=True)
class LogPart(Chunk):
    """Agent to command, in answer to ReadLog: header of up to ``PART_BYTES``; none: the file has no more yet.

    ``problem``: why the file cannot be read; empty if it can. ``size``: bytes of the file at this moment. ``is_own``:
    the file is of the user of the agent.
    """

    nbytes: ChunkSize
    problem: OneLine = ""
    size: Size = 0
    is_own: bool = True


TO_AGENT = {ReadLog: "queries"}
FROM_AGENT = (LogPart,)


def serve(query: ReadLog, _stream: BinaryIO, outbox: Any) -> None:
    """In the agent, whose ``Outbox`` this is: read a part of a regular file, and send it. Other queries may follow."""
    data, problem, size, is_own = b"", "", 0, True
    try:
        if query.path:
            with kept_files.open_regular(query.path) as file:
                status = os.fstat(file.fileno())
                size, is_own = status.st_size, status.st_uid == os.geteuid()
                data = os.pread(file.fileno(), PART_BYTES, query.offset)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte.
        problem = getattr(error, "strerror", None) or str(error)
    outbox.send_file(LogPart(len(data), problem, size, is_own), data)
