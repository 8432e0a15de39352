"""Writes the log files that other machines send.

Runs in the launcher, in one thread, because a slow disk must not hold up the main thread. The caller must
have checked names and amounts.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from dataclasses import field
from functools import partial
from pathlib import Path

from ddplaunch.features.collect_logs.records import GrantLogBytes, LogChunk, cost
from ddplaunch.late_dataclass import dataclass
from ddplaunch.system.files import kept_files
from ddplaunch.system.files.kept_files import keep_free
from ddplaunch.threads import in_thread


@dataclass
class Written:
    """What was written of a node's logs; only the writer's thread changes it.

    Attributes:
        cost: cost of all pieces written, as in ``records.cost``; the node may send this amount again.
        local_ranks: the workers whose logs were written.
        is_shared: launcher and node share the folder, which contains the files already; nothing is written.
    """

    files: int = 0
    nbytes: int = 0
    cost: int = 0
    local_ranks: set[str] = field(default_factory=set)
    is_shared: bool = False


class LogWriter:
    """The thread and its queue. The window of each node bounds the queue.

    Attributes:
        failure: why no further data can be written; None if it can.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._pieces: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = in_thread("logs", self._run)

    def put(self, folder: Path, chunk: LogChunk, data: bytes, written: Written, send: Callable[[object], None]) -> None:
        """Queue the next piece of a node's logs for a file below ``folder``.

        Once the piece is written, ``send`` is called with a request for more.
        """
        self._pieces.put(partial(_write, folder / chunk.path, chunk, data, written, send))

    def close(self, timeout_s: float) -> None:
        """Write the queued pieces, for at most ``timeout_s``, and end the thread."""
        self._pieces.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (write := self._pieces.get()) is not None:
            if self.failure is None:
                try:
                    write()
                except OSError as error:
                    self.failure = error.strerror or str(error)


def _write(path: Path, chunk: LogChunk, data: bytes, written: Written, send: Callable[[object], None]) -> None:
    if written.is_shared:
        return
    part = path.with_name(f"{path.name}.part")
    if not os.path.exists(part):
        if os.path.lexists(path):
            written.is_shared = True
            send(GrantLogBytes(0))
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _append(part, data)
    if chunk.is_last:
        part.rename(path)
        written.files += 1
        written.local_ranks.update(Path(chunk.path).parts[1:-1])
    written.nbytes += chunk.nbytes
    written.cost += cost(chunk)  # Before the request, since the answer may arrive at once.
    send(GrantLogBytes(cost(chunk)))


def _append(path: Path, data: bytes) -> None:
    """Append ``data``.

    Raises:
        OSError: it cannot be written; the file was removed.
    """
    fd = kept_files.open_to_append(path)
    try:
        keep_free(fd, len(data))
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
