"""The console: the workers' lines and our own messages on stdout and stderr.

Runs in the launcher. One thread writes each stream, so that a stopped terminal or a full pipe blocks neither the main
thread nor the threads that read the agents' records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddplaunch.launcher.display.console_log import FILE, ConsoleLog, plain
from ddplaunch.launcher.display.stream_writer import StreamWriter
from ddplaunch.protocol.output_runs import by_stream
from ddplaunch.system.files import kept_files
from ddplaunch.text import escape

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.launcher.display.line_prefix import Style
    from ddplaunch.protocol.launcher_agent import Output
    from ddplaunch.protocol.results import StreamName

_LAST_MESSAGES_S = 1.0

_REWRITE_S = 0.25
"""Seconds between two versions of the progress on a terminal, and before the first: short activities show no line."""

_FIRST_S, _AGAIN_S = 5.0, 10.0
"""Elsewhere."""


class Console:
    """The two output streams. Any thread may call ``output`` and ``show``; neither blocks.

    A Console is created before the agents' handles. ``keep_log`` makes it also write console.log.

    Attributes:
        logs: where the logs are, for a message.
        stdout_fd: the descriptor that gets the workers' stdout.
        is_shared: both streams are one file.
        flushes: of what holds back lines before it calls ``output``: shows them.
    """

    def __init__(
        self, style: Style, stdout_fd: int = 1, stderr_fd: int = 2, stderr: StreamWriter | None = None
    ) -> None:
        """``stderr`` writes to the file of both descriptors, if that takes more than a StreamWriter."""
        self._style = style
        self.logs, self.stdout_fd = "", stdout_fd
        self._is_coloured = style.colour["stderr"]
        self._stderr = stderr or StreamWriter(stderr_fd, style)
        self.is_shared = stderr is not None or _is_same_file(stdout_fd, stderr_fd)
        self._stdout = self._stderr if self.is_shared else StreamWriter(stdout_fd, style, self._on_stdout_error)
        self._log: ConsoleLog | None = None
        self.flushes: list[Callable[[], None]] = []

    @classmethod
    def in_file(cls, folder: Path, style: Style, *, reports_full_disk: bool) -> Console:
        """A console that is console.log in the run folder; stdout and stderr of this process are this file.

        Raises:
            OSError, RuntimeError: as ``ConsoleLog``.
        """
        log = ConsoleLog(folder, style, None, reports_full_disk=reports_full_disk, is_stdout=True)
        return cls(log.style, stderr=log)

    def restyle(self, style: Style) -> None:
        """Use another ``style`` from now on."""
        self._style = self._stdout.style = self._stderr.style = style
        if self._log:
            self._log.style = plain(style)

    def keep_log(self, folder: Path, *, reports_full_disk: bool) -> None:
        """Also write everything to console.log in the run folder, from now on; see ``ConsoleLog``."""
        try:
            self._log = ConsoleLog(folder, self._style, self._on_log_error, reports_full_disk=reports_full_disk)
        except (OSError, RuntimeError) as error:
            kept_files.note(folder / FILE, error)
            if reports_full_disk:
                self._on_log_error(f"cannot be written ({getattr(error, 'strerror', None) or error})")

    def show_no_prefix(self) -> None:
        """Show the workers' bytes as they are, and on stdout nothing else."""
        for writer in self._writers:
            writer.is_plain = True
        if not self.is_shared:
            self._stdout.show_dropped = self._stderr.show

    @property
    def is_plain(self) -> bool:
        """Whether lines have no prefix."""
        return self._stdout.is_plain

    @property
    def _writers(self) -> tuple[StreamWriter, ...]:
        return (self._stdout, self._stderr, *([self._log] if self._log else []))

    def output(self, header: Output, data: bytes) -> None:
        """Queue lines of a worker; while the queue is full, drop them and count them."""
        if not header.on_terminal:
            for each in ((header, data),) if self.is_shared else by_stream(header, data):
                self._writer(each[0].stream).output(*each)
        if self._log:
            self._log.output(header, data)

    def _writer(self, stream: StreamName) -> StreamWriter:
        return self._stdout if stream == "stdout" else self._stderr

    def is_terminal(self, stream: StreamName) -> bool:
        """Whether the stream is a terminal, which can show ``live_lines``."""
        return self._writer(stream).is_terminal

    def live_lines(self, stream: StreamName, lines: list[tuple[Output, bytes]]) -> None:
        """Show these unfinished lines of workers below the output of the stream, in place of the previous ones."""
        self._writer(stream).live_lines(lines)

    def show(self, text: str) -> None:
        """Queue a message of the launcher, on stderr; control characters in it are escaped."""
        self._show_escaped(f"{self._style.time}{escape(text)}")

    def note(self, text: str) -> None:
        """As ``show``, but only in console.log: another part of this process shows ``text`` at the end."""
        if self._log:
            self._log.show(_encode(f"{self._style.time}{escape(text)}"))

    def show_page(self, text: str) -> None:
        """Queue a failure page. On a terminal the line below its title, which names the cause, is bold."""
        plain = escape(text)
        title, cause, *rest = plain.split("\n")
        self._show_escaped(plain, "\n".join((title, f"\x1b[1m{cause}\x1b[0m" if self._is_coloured else cause, *rest)))

    def _show_escaped(self, text: str, coloured: str = "") -> None:
        self._stderr.show(_encode(coloured or text))
        if self._log:
            self._log.show(_encode(text))

    def flush(self) -> None:
        """Queue what ``flushes`` hold back, so that it stands before the next message."""
        for flush in reversed(self.flushes):  # What is nearer to the console was first.
            flush()

    def hold(self, *, is_held: bool) -> None:
        """Hold back lines and messages while a debugger has the terminal, as far as there is room; or no longer."""
        for writer in (self._stdout, self._stderr):
            writer.hold(is_held=is_held and writer.is_tty)

    def raw(self, data: bytes, written: Callable[[], object] = lambda: None) -> None:
        """Write bytes to stdout as they are, also while lines are held back; then call ``written``, in a thread."""
        self._stdout.raw(data, written)

    def wait_raw(self, timeout_s: float) -> None:
        """While lines are held back: wait until the ``raw`` bytes are written, for up to ``timeout_s`` seconds."""
        self._stdout.wait(timeout_s)

    @property
    def has_progress(self) -> bool:
        """Whether stderr is a terminal, on which ``progress`` can be shown."""
        return self._stderr.is_terminal

    def progress(self, text: str) -> None:
        """Show ``text``, cut to the width, as the last line, in place of the previous one, until other output comes."""
        self._stderr.progress(escape(text[: self._stderr.columns - 1]))

    def leave_terminal(self) -> None:
        """Treat both streams as files from now on: redrawn lines become lines of console.log."""
        self._stdout.is_terminal = self._stderr.is_terminal = False

    def _on_stdout_error(self, problem: str) -> None:
        self.show(f"ddplaunch: stdout {problem}; the job goes on, {self.logs}")

    def wait_shown(self, timeout_s: float) -> None:
        """Wait until what was queued is written, for up to ``timeout_s`` seconds; nothing is dropped."""
        self._stderr.wait(timeout_s)

    def _on_log_error(self, problem: str) -> None:
        self.show(f"ddplaunch: console.log {problem}; the job goes on")

    def drain(self, interrupted: Callable[[], bool], stall_s: float) -> None:
        """Wait until the queues are empty; stop after ``stall_s`` without progress, or when ``interrupted()``.

        The number of lines dropped from stdout's queue is then shown on stderr, if stderr can be written.
        """
        self.flush()
        writers = self._writers
        written, deadline = -1, 0.0
        while not all(writer.wait(0.05) for writer in writers) and not interrupted():
            now = sum(writer.written for writer in writers)
            if written != now:
                written, deadline = now, time.monotonic() + stall_s
            elif time.monotonic() > deadline:
                break
        if self._stderr.wait(0.0):
            for message in self._stdout.drop_queued():
                self._stderr.show(message)
            self._stderr.wait(_LAST_MESSAGES_S)

    def close(self) -> None:
        """End the threads once the queues are empty. No other method may be called afterwards."""
        for writer in self._writers:
            writer.close()


class Progress:
    """The progress of one activity at a time: a line that is rewritten on a terminal, elsewhere one every few seconds.

    Times are ``time.monotonic()``'s.
    """

    def __init__(self, console: Console, *, is_quiet: bool) -> None:
        self._console = console
        self._is_quiet = is_quiet
        self._due: float | None = None

    def show(self, text: Callable[[], str]) -> float:
        """The activity is in progress: show ``text()`` if a line is due. Returns when to call again."""
        if self._is_quiet:
            return float("inf")
        now, is_rewritten = time.monotonic(), self._console.has_progress
        if self._due is None:
            self._due = now + (_REWRITE_S if is_rewritten else _FIRST_S)
        elif now >= self._due:
            self._due = now + (_REWRITE_S if is_rewritten else _AGAIN_S)
            line = f"ddplaunch: {text()}"
            if is_rewritten:
                self._console.progress(line)
            else:
                self._console.show(line)
        return self._due

    def end(self) -> None:
        """The activity is over: remove its line."""
        if self._due is not None and self._console.has_progress:
            self._console.progress("")
        self._due = None


def _encode(text: str) -> bytes:
    return f"{text}\n".encode("utf-8", "backslashreplace")


def _is_same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:  # One of them is closed.
        return False
