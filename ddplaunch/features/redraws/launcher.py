"""Shows few of the redraws of a line.

Runs in the launcher, in the threads that read the agents' records.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.protocol.launcher_agent import Output
from ddplaunch.protocol.output_runs import runs_of

if TYPE_CHECKING:
    from ddplaunch.launcher.display.console import Console
    from ddplaunch.protocol.results import StreamName
    from ddplaunch.transport.handle import WriteOutput

_AGAIN_S = 5.0
_MAX_LIVE_LINES = 10
_MAX_LINE_BYTES = 1 << 13


@dataclass
class _Redrawn:
    """The unfinished line of one worker's stream; ``shown_s`` is when it was last shown as a line, or has begun."""

    header: Output
    shown_s: float
    text: bytes = b""


class Redraws:
    """Passes the lines of one console stream on to ``show``, without most of their redraws. Any thread.

    ``show_live`` replaces the live lines of a terminal, each with its header; ``is_live``: whether there is a terminal.
    """

    def __init__(
        self,
        show: WriteOutput,
        show_live: Callable[[list[tuple[Output, bytes]]], None],
        is_live: Callable[[], bool],
    ) -> None:
        self._show = show
        self._show_live, self._is_live = show_live, is_live
        self._lock = threading.Lock()
        self._redrawn: dict[tuple[int, str], _Redrawn] = {}
        self._has_live = False

    def output(self, header: Output, data: bytes) -> None:
        """Show finished lines, and note the last redraw of an unfinished one. Does not block."""
        with self._lock:
            key = (header.rank, header.stream)
            redrawn = self._redrawn.get(key)
            if not (redrawn and redrawn.text) and data.count(b"\r") == data.count(b"\r\n"):
                self._show(header, data)
            else:
                redrawn = self._redrawn.setdefault(key, _Redrawn(header, time.monotonic()))
                self._redraw(redrawn, header, data)
            self._update_live()

    @property
    def is_drawing(self) -> bool:
        """Whether a line is being redrawn."""
        return any(each.text for each in self._redrawn.values())

    def flush(self) -> None:
        """Show the last redraw of every unfinished line, as a line."""
        with self._lock:
            unfinished = list(self._redrawn.values())
            self._redrawn.clear()
            self._update_live()
            for redrawn in unfinished:
                self._show_last(redrawn)

    def _update_live(self) -> None:
        live = [each for _, each in sorted(self._redrawn.items()) if each.text]
        if self._is_live() and (live or self._has_live):
            self._has_live = bool(live)
            self._show_live([(each.header, _last_drawn(each.text)) for each in live[:_MAX_LIVE_LINES]])

    def _redraw(self, redrawn: _Redrawn, header: Output, data: bytes) -> None:
        *finished, rest = (redrawn.text + data).split(b"\n")
        lines = b"".join(_last_drawn(line) + (b"\r\n" if line.endswith(b"\r") else b"\n") for line in finished)
        if lines or header.lost_lines:
            self._show(header, lines)
        redrawn.header = replace(header, lost_lines=0)
        redrawn.text = (_last_drawn(rest) + (b"\r" if rest.endswith(b"\r") else b""))[-_MAX_LINE_BYTES:]
        now = time.monotonic()
        if not self._is_live() and redrawn.text and now >= redrawn.shown_s + _AGAIN_S:
            self._show_last(redrawn)
            redrawn.shown_s = now

    def _show_last(self, redrawn: _Redrawn) -> None:
        text = _last_drawn(redrawn.text)
        if text:
            self._show(redrawn.header, text + b"\n")


def _last_drawn(line: bytes) -> bytes:
    """What remains visible of a line: the text after the last carriage return that has any text after it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class RedrawnLines(Watch):
    """Those of both streams of a console. Lines of a lone worker are not changed."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def on_output(self, write: WriteOutput) -> WriteOutput:
        """Show few of the redraws of each stream."""
        console = self._console
        stderr = self._redraws(write, "stderr")
        stdout = stderr if console.is_shared else self._redraws(write, "stdout")

        def output(header: Output, data: bytes) -> None:
            if console.is_plain or (header.runs and b"\r" not in data and not (stdout.is_drawing or stderr.is_drawing)):
                write(header, data)
                return
            for each, run in runs_of(header, data):
                (stdout if each.stream == "stdout" else stderr).output(each, run)

        return output

    def _redraws(self, write: WriteOutput, stream: StreamName) -> Redraws:
        console = self._console
        redraws = Redraws(write, partial(console.live_lines, stream), partial(console.is_terminal, stream))
        console.flushes.append(redraws.flush)
        return redraws


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (RedrawnLines(run.messages.console),)
