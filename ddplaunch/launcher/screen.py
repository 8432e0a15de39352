"""A terminal or file with a thread that writes to it: lines, counts of what could not be shown, and progress."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddplaunch.launcher.line_style import prefixed

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.launcher.line_style import Style
    from ddplaunch.records import Output

_QUEUE_BYTES = 24 << 20
_ENTRY_BYTES = 512
"""What an entry of the queue costs beside its bytes: millions of short ones must not pass for little."""

_ERASE = b"\r\x1b[K"  # ECMA-48: to the start of the line, and erase it.
_WRITE_BYTES = 1 << 16


@dataclass(frozen=True)
class _Open:
    """A line that is not finished on the screen, whose it is, and whether it ended in a carriage return."""

    rank: int
    stream: str
    returned: bool


class Screen:
    """A descriptor with a thread that writes to it, behind a bounded queue. ``complain`` gets its first failure."""

    def __init__(self, fd: int, style: Style, complain: Callable[[str], None] | None = None) -> None:
        self._fd = fd
        self._style = style
        self._complain = complain
        self.is_plain = False
        self.written = 0
        self._changed = threading.Condition()
        self._queue: deque[tuple[Output | None, bytes]] = deque()
        self._queued_bytes = 0
        self._is_full = False
        self._is_broken = self._is_closed = False
        self._writing: tuple[Output | None, memoryview] | None = None
        self._lost: dict[tuple[int, str], Output] = {}
        self._open: _Open | None = None
        self._progress: str | None = None
        self._shown_progress = ""
        self.is_terminal = os.isatty(fd) and os.environ.get("TERM", "dumb") != "dumb"
        threading.Thread(target=self._write_all, name=f"console[{fd}]", daemon=True).start()

    def output(self, header: Output, data: bytes) -> None:
        """Queue lines, or count them once ``_QUEUE_BYTES`` wait, until that has halved."""
        with self._changed:
            self._is_full = self._queued_bytes > (_QUEUE_BYTES // 2 if self._is_full else _QUEUE_BYTES)
            if self._is_full:
                self._count_lost(header, data)
                return
            before = self._lost.pop((header.rank, header.stream), None)
            if before:
                header = replace(header, lost_lines=header.lost_lines + before.lost_lines)
            self._queue.append((header, data))
            self._queued_bytes += len(data) + _ENTRY_BYTES
            self._changed.notify_all()

    def say(self, data: bytes) -> None:
        """Queue a message of ours, behind the count of what was lost before it."""
        with self._changed:
            self._queue.extend((header, b"") for header in self._lost.values())
            self._queued_bytes += len(self._lost) * _ENTRY_BYTES
            self._lost.clear()
            self._queue.append((None, data))
            self._changed.notify_all()

    def progress(self, text: str) -> None:
        """Have this shown once there is nothing else to show; the last one counts."""
        with self._changed:
            self._progress = text
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Whether all is written within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._has_more() or self._writing), timeout_s)

    def close(self) -> None:
        """End the thread, after what is queued."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _has_more(self) -> bool:
        return bool(self._queue or self._lost or self._progress is not None)

    def give_up(self) -> list[bytes]:
        """Empty the queue. Returns what to say of it, a message for each stream."""
        with self._changed:
            if self._writing and self._writing[0]:
                self._count_lost(self._writing[0], bytes(self._writing[1]))
            for header, data in self._queue:
                if header:
                    self._count_lost(header, data)
            self._queue.clear()
            self._progress = None
            lost, self._lost = list(map(self._lost_text, self._lost.values())), {}
            return lost

    def _count_lost(self, header: Output, data: bytes) -> None:
        key = (header.rank, header.stream)
        before = self._lost[key].lost_lines if key in self._lost else 0
        lines = before + header.lost_lines + (max(1, data.count(b"\n")) if data else 0)
        self._lost[key] = replace(header, nbytes=0, lost_lines=lines)

    def _lost_text(self, header: Output) -> bytes:
        return f"... {header.lost_lines:,} lines not shown, see {self._style.log_hint(header)}\n".encode()

    def _write_all(self) -> None:
        while (piece := self._next()) is not None:
            header, data = piece
            if header is not None and header.lost_lines:
                self._write(None, self._erased() + self._compose(None, self._lost_text(header)))
            if data:
                self._write(header, self._erased() + self._compose(header, data))
            elif header is None:
                self._write_progress()

    def _write_progress(self) -> None:
        with self._changed:
            text, self._progress = self._progress or "", None
        if text != self._shown_progress:
            line = text.encode("utf-8", "backslashreplace")
            self._write(None, self._erased() + (self._compose(None, line) if line else b""))
            self._shown_progress = text

    def _erased(self) -> bytes:
        """What takes the line with progress away, if it is there."""
        shown, self._shown_progress = self._shown_progress, ""
        return _ERASE if shown else b""

    def _next(self) -> tuple[Output | None, bytes] | None:
        """What to write next; for progress, neither header nor bytes. None at the end."""
        with self._changed:
            self._writing = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_more() or self._is_closed)
            if not self._has_more():
                return None
            if self._queue:
                header, data = self._queue.popleft()
                self._queued_bytes -= len(data) + _ENTRY_BYTES if header else 0
            elif not self._lost:
                header, data = None, b""
            else:
                header, data = self._lost.pop(next(iter(self._lost))), b""
            self._writing = (None, memoryview(b""))
            return header, data

    def _compose(self, header: Output | None, data: bytes) -> bytes:
        """``data`` with its prefixes, after a newline if somebody else's line is not finished."""
        before, self._open = self._open, None
        if header is None:
            return (b"\n" if before else b"") + data
        if data[-1:] != b"\n":
            self._open = _Open(header.rank, header.stream, data.endswith(b"\r"))
        if self.is_plain:
            return data
        prefix = self._style.prefix(header)
        if before is None:
            return prefix + prefixed(data, prefix)
        if (before.rank, before.stream) != (header.rank, header.stream):
            return b"\n" + prefix + prefixed(data, prefix)
        # After a carriage return the line is written anew, unless a line feed makes it the end of a line.
        start = prefix if before.returned and not data.startswith(b"\n") else b""
        return start + prefixed(data, prefix)

    def _write(self, header: Output | None, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._is_broken:
            self._writing = (header, view)
            try:
                view = view[os.write(self._fd, view[:_WRITE_BYTES]) :]
                self.written += 1
            except BlockingIOError:  # Somebody made the terminal non-blocking.
                select.select([], [self._fd], [])
            except BrokenPipeError:  # `ddplaunch ... | head`: the job goes on, its logs have every line.
                self._is_broken = True
            except OSError as error:  # A full disk may have room again.
                if self._complain:
                    self._complain(str(error.strerror))
                    self._complain = None
                return
