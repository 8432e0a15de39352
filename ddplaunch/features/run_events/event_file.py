"""events.jsonl in the run folder, written by a thread behind a bounded queue.

Runs in the launcher. ``add`` never blocks; a disk that is full or slow costs events, which are counted, and nothing
else. The file has at most ``MAX_BYTES``.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import time
from typing import TYPE_CHECKING

from ddplaunch.features.runs.run_json import EVENTS
from ddplaunch.system.files import kept_files
from ddplaunch.system.files.kept_files import keep_free
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    import threading
    from pathlib import Path

MAX_BYTES = 16 << 20
_MAX_QUEUED = 20_000
_MAX_TEXT = 2000
_LAST_EVENTS_S = 1.0

Event = dict[str, object]


class EventFile:
    """The file and its thread. Without a folder, or where no file can be made, events are ignored."""

    def __init__(self, folder: Path | None) -> None:
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._fd, self._nbytes, self._lost = -1, 0, 0
        self._is_at_line_end = True
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None
        if folder:
            with contextlib.suppress(RuntimeError), kept_files.noting(folder / EVENTS):  # The limit of threads.
                self._fd = kept_files.open_to_append(folder / EVENTS)  # Stays open if the folder is moved.
                self._thread = in_thread("events", self._run)

    def add(self, event: Event) -> None:
        """Queue a line. Any thread."""
        if self._thread is None:
            return
        if self._queue.qsize() < _MAX_QUEUED:
            self._queue.put(event)
        else:
            self._lost += 1

    def close(self) -> None:
        """Write what is queued, for up to ``_LAST_EVENTS_S``, and end the thread."""
        if self._thread:
            self._queue.put(None)
            self._thread.join(_LAST_EVENTS_S)

    # In the thread.

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            self._write(event)
        if self._lost and self._nbytes <= MAX_BYTES:
            self._try_to_write(self._told_losses(round(time.time(), 3)))
        if self._error:
            kept_files.note_fd(self._fd, self._error)
        kept_files.close(self._fd)

    def _write(self, event: Event) -> None:
        is_last = event.get("event") == "run_ended"
        if self._nbytes > MAX_BYTES and not is_last:
            return
        data = self._told_losses(event.get("t")) + _encode(event)
        if self._nbytes + len(data) > MAX_BYTES and not is_last:
            data = _encode({"t": event.get("t"), "event": "limit"})
            self._nbytes = MAX_BYTES + 1
        self._try_to_write(data)

    def _told_losses(self, t: object) -> bytes:
        """The line about the events that were dropped; empty if none were."""
        return _encode({"t": t, "event": "dropped", "count": self._lost}) if self._lost else b""

    def _try_to_write(self, data: bytes) -> None:
        try:
            keep_free(self._fd, len(data))
            self._write_all(data)
            self._lost = 0
        except OSError as error:
            self._lost += 1
            self._error = error

    def _write_all(self, data: bytes) -> None:
        data = data if self._is_at_line_end else b"\n" + data
        while data:
            count = os.write(self._fd, data)
            self._nbytes += count
            self._is_at_line_end = data[count - 1 : count] == b"\n"
            data = data[count:]


def _encode(event: Event) -> bytes:
    known = {key: value for key, value in event.items() if value is not None}
    if isinstance(text := known.get("text"), str):
        known["text"] = text[:_MAX_TEXT]
    return json.dumps(known, separators=(",", ":")).encode() + b"\n"
