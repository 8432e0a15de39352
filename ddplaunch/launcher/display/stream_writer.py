"""One output stream of the launcher: a descriptor, a bounded queue, and the thread that writes.

Runs in the launcher. It writes prefixed lines of workers, messages, the progress line, and the number of dropped
lines. Must not block the calling threads.
"""

from __future__ import annotations

import os
import re
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.launcher.display.line_prefix import Style, prefixed
from ddplaunch.protocol.output_runs import by_stream, count_lost, runs_of
from ddplaunch.text import quote
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from ddplaunch.protocol.launcher_agent import Output

_QUEUE_BYTES = 24 << 20
_ENTRY_BYTES, _RUN_BYTES = 512, 40
"""Memory of a queue entry, and of each of its runs, in addition to its bytes."""

_ERASE = b"\r\x1b[K"  # ECMA-48: to the start of the line, and erase it.
_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_WRITE_BYTES = 1 << 16


_Entry = tuple["Output | None", bytes, "Callable[[], object] | None"]
"""Lines of a worker, or a message; or bytes that are written as they are, with what is called afterwards."""


class StreamWriter:
    """Writes to ``fd`` in a thread, behind a bounded queue; calls ``on_error`` with the first problem.

    Attributes:
        style: the appearance of the lines.
        is_plain: lines have no prefix.
        show_dropped: shows the message that lines were dropped; None: it stands where they are missing.
        written: number of successful writes.
        is_tty: ``fd`` is a terminal of any kind.
    """

    def __init__(self, fd: int, style: Style, on_error: Callable[[str], None] | None = None) -> None:
        self._fd = fd
        self.style = style
        self._on_error = on_error
        self.is_plain = False
        self.show_dropped: Callable[[bytes], None] | None = None
        self.written = 0
        self._changed = threading.Condition()
        self._queue: deque[tuple[Output | None, bytes, int]] = deque()
        """What to write, and the memory that it takes."""
        self._queued_bytes = 0
        self._raw: deque[tuple[bytes, Callable[[], object]]] = deque()
        self._is_full = self._is_held = False
        self._is_broken = self._is_closed = False
        self._writing: tuple[Output | None, memoryview] | None = None
        self._dropped: dict[tuple[int, str], Output] = {}
        self._unwritten: dict[tuple[int, str], Output] = {}
        """As ``_dropped``, for lines that failed writes have lost: shown with the next output, not at once."""
        self._unfinished: tuple[int, str] | None = None
        """The worker's stream whose line on the terminal has no line feed yet; ``_returned``: it ends with a return."""
        self._returned = False
        self._ended: set[tuple[int, str]] = set()
        """Streams whose unfinished line was ended here, because another line came between: its newline is to come."""
        self._progress: str | None = None
        self._shown_progress = ""
        self.is_tty = os.isatty(fd)
        self.is_terminal = self.is_tty and os.environ.get("TERM", "dumb") != "dumb"
        in_thread(f"console[{fd}]", self._write_all)

    def output(self, header: Output, data: bytes) -> None:
        """Queue lines. Above ``_QUEUE_BYTES`` drop and count them, until half of the queue is written."""
        with self._changed:
            self._count_unwritten()
            self._is_full = self._queued_bytes > (_QUEUE_BYTES // 2 if self._is_full else _QUEUE_BYTES)
            if self._is_full:
                self._count_dropped(header, data)
                return
            if header.runs:
                self._queue_dropped([key for key in self._dropped if key[0] == header.rank])
            elif before := self._dropped.pop((header.rank, header.stream), None):
                header = replace(header, lost_lines=header.lost_lines + before.lost_lines)
            nbytes = len(data) + _ENTRY_BYTES + len(header.runs) * _RUN_BYTES
            self._queue.append((header, data, nbytes))
            self._queued_bytes += nbytes
            self._changed.notify_all()

    def show(self, data: bytes) -> None:
        """Queue a message of the launcher, after the number of lines dropped before it."""
        with self._changed:
            self._queue_dropped(list(self._dropped))
            self._queue.append((None, data, 0))
            self._changed.notify_all()

    def _queue_dropped(self, streams: list[tuple[int, str]]) -> None:
        self._queue.extend((self._dropped.pop(key), b"", _ENTRY_BYTES) for key in streams)
        self._queued_bytes += len(streams) * _ENTRY_BYTES

    def hold(self, *, is_held: bool) -> None:
        """Hold back all but ``raw`` bytes in the queue, or no longer."""
        with self._changed:
            self._is_held = is_held
            self._changed.notify_all()

    def raw(self, data: bytes, written: Callable[[], object]) -> None:
        """Write bytes as they are, before what is queued; ``written`` is called in the thread afterwards."""
        with self._changed:
            self._raw.append((data, written))
            self._changed.notify_all()

    def progress(self, text: str) -> None:
        """Show ``text``, of one or more lines, once the queue is empty; it replaces the previous text."""
        with self._changed:
            self._progress = text
            self._changed.notify_all()

    def live_lines(self, lines: list[tuple[Output, bytes]]) -> None:
        """Show these unfinished lines of workers as ``progress``, with their prefixes, cut to the terminal's width."""
        self.progress("\n".join(self._live_line(header, line) for header, line in lines))

    def _live_line(self, header: Output, line: bytes) -> str:
        prefix = self.style.prefix(header).decode("utf-8", "replace")
        text = _CONTROL_SEQUENCE.sub("", line.decode("utf-8", "replace"))
        columns = self.columns - len(_CONTROL_SEQUENCE.sub("", prefix)) - 1
        return prefix + "".join(filter(str.isprintable, text))[: max(0, columns)]

    @property
    def columns(self) -> int:
        """The width of the terminal."""
        try:
            return os.get_terminal_size(self._fd).columns or 80
        except OSError:
            return 80

    def wait(self, timeout_s: float) -> bool:
        """Whether everything is written within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._has_more() or self._writing), timeout_s)

    def close(self) -> None:
        """End the thread once the queue is empty."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _has_more(self) -> bool:
        return bool(self._raw or (not self._is_held and (self._queue or self._dropped or self._progress is not None)))

    def drop_queued(self) -> list[bytes]:
        """Empty the queue. Returns one message per worker's stream, with the number of dropped lines."""
        with self._changed:
            self._count_unwritten()
            if self._writing and self._writing[0]:
                self._count_dropped(self._writing[0], bytes(self._writing[1]))
            for header, data, _ in self._queue:
                if header:
                    self._count_dropped(header, data)
            self._queue.clear()
            self._progress = None
            messages, self._dropped = list(map(self._dropped_text, self._dropped.values())), {}
            return messages

    def _count_unwritten(self) -> None:
        for header in self._unwritten.values():
            self._count_dropped(header, b"")
        self._unwritten.clear()

    def _keep_unwritten(self, header: Output, lines: int) -> None:
        if lines:
            with self._changed:
                key = (header.rank, header.stream)
                lines += self._unwritten[key].lost_lines if key in self._unwritten else 0
                self._unwritten[key] = replace(header, nbytes=0, lost_lines=lines)

    def _count_dropped(self, header: Output, data: bytes) -> None:
        for each, run in by_stream(header, data):
            key = (each.rank, each.stream)
            before = self._dropped[key].lost_lines if key in self._dropped else 0
            self._dropped[key] = replace(each, nbytes=0, lost_lines=count_lost(each, run, before))

    def _dropped_text(self, header: Output) -> bytes:
        where = quote(self.style.log_hint(header), 1000)
        return f"... {header.lost_lines:,} lines not shown, see {where}\n".encode("utf-8", "backslashreplace")

    def _write_all(self) -> None:
        while (piece := self._take_next()) is not None:
            header, data, written = piece
            if written:
                self._write(None, self._erased() + data)
                written()
                continue
            if header is not None and header.lost_lines:
                self._write_dropped(header)
            if data:
                composed = self._erased() + self._compose(header, data)
                header = replace(header, runs=()) if header else None  # Lines that are lost count as of the first.
                lost_lines = self._write(header, composed)
                if header is not None:
                    self._keep_unwritten(header, lost_lines)
            elif header is None:
                self._write_progress()

    def _write_dropped(self, header: Output) -> None:
        text = self._dropped_text(header)
        if self.show_dropped:
            self.show_dropped(text)
            return
        is_lost = self._write(None, self._erased() + self._compose(None, text))
        self._keep_unwritten(header, header.lost_lines if is_lost else 0)

    def _write_progress(self) -> None:
        with self._changed:
            text, self._progress = self._progress or "", None
        if text != self._shown_progress:
            line = text.encode("utf-8", "backslashreplace")
            self._write(None, self._erased() + (self._compose(None, line) if line else b""))
            self._shown_progress = text

    def _erased(self) -> bytes:
        """The bytes that erase the progress text, if there is one."""
        shown, self._shown_progress = self._shown_progress, ""
        above = shown.count("\n")
        return _ERASE + (b"\x1b[%dA\x1b[J" % above if above else b"") if shown else b""

    def _take_next(self) -> _Entry | None:
        """The next entry to write; neither header nor bytes for the progress line. None at the end."""
        with self._changed:
            self._writing = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_more() or self._is_closed)
            if not self._has_more():
                return None
            if self._raw:
                self._writing = (None, memoryview(b""))
                return (None, *self._raw.popleft())
            if self._queue:
                header, data, nbytes = self._queue.popleft()
                self._queued_bytes -= nbytes
            elif not self._dropped:
                header, data = None, b""
            else:
                header, data = self._dropped.pop(next(iter(self._dropped))), b""
            self._writing = (None, memoryview(b""))
            return header, data, None

    def _compose_runs(self, header: Output, data: bytes) -> bytes:
        """Whole lines of both streams of a worker: at once, where nothing distinguishes them."""
        colour = self.style.colour
        if self._ended or self._unfinished or colour["stdout"] != colour["stderr"]:
            return b"".join(self._compose(*run) for run in runs_of(header, data))
        return self._compose(replace(header, runs=()), data)

    def _compose(self, header: Output | None, data: bytes) -> bytes:
        """``data`` with its prefixes, after a newline if another worker's line is unfinished."""
        if header and header.runs:
            return self._compose_runs(header, data)
        key = (header.rank, header.stream) if header else None
        if key in self._ended:
            self._ended.discard(key)
            data = data.removeprefix(b"\n")
            if not data:
                return b""
        before, self._unfinished = self._unfinished, None
        if before and before != key and not self.is_plain:
            self._ended.add(before)
        if header is None:
            return (b"\n" if before else b"") + data
        had_returned, self._returned = self._returned, data.endswith(b"\r")
        if data[-1:] != b"\n":
            self._unfinished = key
        if self.is_plain:
            return data
        prefix = self.style.prefix(header)
        if before == key:  # After a carriage return the line is overwritten, unless a line feed ends it.
            start = prefix if had_returned and not data.startswith(b"\n") else b""
        else:
            start = (b"\n" if before else b"") + prefix
        return start + prefixed(data, prefix)

    def _write(self, header: Output | None, data: bytes) -> int:
        """Write ``data``. Returns the number of lines that an error of the disk or the terminal has lost."""
        view = memoryview(data)
        while view and not self._is_broken:
            self._writing = (header, view)
            try:
                view = view[self._write_piece(view[:_WRITE_BYTES]) :]
                self.written += 1
            except BlockingIOError:  # Another process made the terminal non-blocking.
                select.select([], [self._fd], [])
            except BrokenPipeError:  # `ddplaunch ... | head`: the job continues, its logs have every line.
                self._is_broken = True
                self._report("is not read any more")
            except OSError as error:  # A full disk may have space again later.
                self._report(f"cannot be written ({error.strerror})")
                return max(1, bytes(view).count(b"\n"))
        return 0

    def _write_piece(self, data: memoryview) -> int:
        """Write the beginning of ``data``; returns its length. Only the thread calls it.

        Raises:
            OSError: nothing was written.
        """
        return os.write(self._fd, data)

    def _report(self, problem: str) -> None:
        if self._on_error:
            self._on_error(problem)
            self._on_error = None
