"""Writes the log files that other machines send, in a thread of its own: a slow disk must not hold up the launcher."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ddplaunch.launcher.handles import LogData
from ddplaunch.logs import LogsWanted, cost

_KEPT_FREE_BYTES = 1 << 20
"""The run's report comes after its logs, and on the same disk."""


@dataclass
class Written:
    """What was written of a node's logs; the writer's thread alone counts it.

    Attributes:
        cost: of the pieces written, which are wanted again.
        local_ranks: of the workers they are of.
        is_there: the node's folder is this one, on a file system that both have. Nothing is written then.
    """

    files: int = 0
    nbytes: int = 0
    cost: int = 0
    local_ranks: set[str] = field(default_factory=set)
    is_there: bool = False


@dataclass(frozen=True)
class _Piece:
    folder: Path
    data: LogData
    written: Written
    send: Callable[[object], None]


class LogWriter:
    """The thread and what waits for it, which those who send bound by what is wanted of them.

    Attributes:
        failure: why nothing can be written any more; empty while it can.
    """

    def __init__(self) -> None:
        self.failure = ""
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def put(self, folder: Path, data: LogData, written: Written, send: Callable[[object], None]) -> None:
        """Have the next piece of a node's logs written below ``folder``; ``send`` then tells its agent that."""
        self._pieces.put(_Piece(folder, data, written, send))

    def close(self, timeout_s: float) -> None:
        """Write what waits, and no longer than that."""
        self._pieces.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            if self.failure or piece.written.is_there:
                continue
            try:
                self._write(piece)
            except OSError as error:
                self.failure = error.strerror or str(error)

    def _write(self, piece: _Piece) -> None:
        chunk, written = piece.data.chunk, piece.written
        path = piece.folder / chunk.path
        part = path.with_name(f"{path.name}.part")
        if not part.exists():
            if os.path.lexists(path):
                written.is_there = True
                piece.send(LogsWanted(0))
                return
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _append(part, piece.data.data)
        if chunk.is_last:
            part.rename(path)
            written.files += 1
            written.local_ranks.update(Path(chunk.path).parts[1:-1])
        written.nbytes += chunk.nbytes
        written.cost += cost(chunk)  # First: what is wanted may come at once.
        piece.send(LogsWanted(cost(chunk)))


def _append(path: Path, data: bytes) -> None:
    """Raises OSError; what there is of the file is then gone."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        disk = os.fstatvfs(fd)
        if disk.f_bavail * disk.f_frsize < len(data) + _KEPT_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
