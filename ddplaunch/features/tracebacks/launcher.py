"""Folds tracebacks on the console, unless there is only one worker.

Runs in the launcher, in the threads that read the agents' records. Lines of a traceback are held back until it is
complete, for at most ``_HOLD_S``; all other lines pass.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.launcher.watches import Watch
from ddplaunch.protocol.first_failure import is_peer_loss
from ddplaunch.text import quote, ranks

if TYPE_CHECKING:
    from ddplaunch.launcher.display.console import Console
    from ddplaunch.launcher.watches import RunServices
    from ddplaunch.protocol.launcher_agent import Output
    from ddplaunch.transport.handle import WriteOutput

_HOLD_S = 0.5
_ONE_EVENT_S = 5.0
"""Equal tracebacks of different ranks within this time are of one event."""

_MAX_HELD_BYTES = 1 << 18

_RANK = rb"(?:\[rank\d+\]: )?"  # Of torch's excepthook.
_TITLE = rb"Traceback \(most recent call last\):\n"
_BEGIN = re.compile(rb"^" + _RANK + _TITLE, re.MULTILINE)
_MORE_OF_NCCL = rb"(?:" + _RANK + rb"(?:nccl\w+Error: .*|Last error:)\n)*"
_WHOLE = re.compile(
    _RANK + _TITLE + rb"(?:" + _RANK + rb"(?:[ \t].*)?\n)*" + _RANK + rb"(?P<exception>\S.*\n)" + _MORE_OF_NCCL
)
_PREFIX = re.compile(rb"^" + _RANK, re.MULTILINE)

_LOST_PEER = re.compile(rb"\.cc:\d+\] |torch\.distributed\.Dist\w+Error")
"""In the exceptions of gloo, NCCL and the store, and not in those of a script that has lost another server."""

_Key = tuple[int, bytes]


class TracebackFolder(Watch):
    """Shows output without tracebacks that another rank has just shown, and names these ranks.

    With ``folds_lost_peers`` also without those of ranks that have lost a peer.
    """

    def __init__(self, console: Console, *, folds_lost_peers: bool) -> None:
        self._console = console
        self._folds_lost_peers = folds_lost_peers
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], tuple[Output, bytes]] = {}
        """By attempt and rank: the rank of the next attempt may be on another node."""
        self._shown: dict[_Key, tuple[int, float]] = {}
        self._folded: dict[_Key, list[int]] = {}
        self._lost_peers: set[int] = set()
        self._is_timed = False

    def on_output(self, write: WriteOutput) -> WriteOutput:
        """Fold the tracebacks on stderr."""
        self._show = write
        self._console.flushes.append(self.flush)

        def fold(header: Output, data: bytes) -> None:
            if header.stream == "stdout" or self._console.is_plain:
                write(header, data)
            else:
                self._fold(header, data)

        return fold

    def _fold(self, header: Output, data: bytes) -> None:
        """Show ``data``, or hold back its end if that may be part of a traceback to fold. Does not block."""
        with self._lock:
            if (header.attempt, header.rank) in self._held:
                header, held = self._held.pop((header.attempt, header.rank))
                data = held + data
            self._pass_on(header, data)
            if (self._held or self._folded or self._lost_peers) and not self._is_timed:
                self._start_timer()

    def _start_timer(self) -> None:
        timer = threading.Timer(_HOLD_S, self.flush)
        timer.daemon = True
        try:
            timer.start()
            self._is_timed = True
        except RuntimeError:  # The limit of threads is reached: hold nothing back.
            self._flush()

    def flush(self) -> None:
        """Show what is held back, and name the ranks whose tracebacks were folded."""
        with self._lock:
            self._is_timed = False
            self._flush()

    def _flush(self) -> None:
        for header, data in self._held.values():
            self._show(header, data)
        for (_, text), folded in self._folded.items():
            exception = text.rstrip().rpartition(b"\n")[2].decode("utf-8", "replace")
            self._console.show(f"ddplaunch: {ranks(folded)}: the same traceback ({quote(exception)})")
        if self._lost_peers:
            line = f"{ranks(self._lost_peers)} lost a peer; tracebacks are in the logs, and shown with -v"
            self._console.show(f"ddplaunch: {line}")
        self._held, self._folded = {}, {}
        self._lost_peers.clear()

    def _pass_on(self, header: Output, data: bytes) -> None:
        while begin := _BEGIN.search(data):
            whole = _WHOLE.match(data, begin.start())
            if whole is None and len(data) < _MAX_HELD_BYTES:
                header = self._show_part(header, data[: begin.start()])
                self._held[header.attempt, header.rank] = header, data[begin.start() :]
                return
            end = whole.end() if whole else len(data)
            is_folded = whole is not None and self._is_folded(header, whole)
            header = self._show_part(header, data[: begin.start() if is_folded else end])
            data = data[end:]
        if data or header.lost_lines:
            self._show(header, data)

    def _show_part(self, header: Output, data: bytes) -> Output:
        """Show ``data``; returns the header of what follows."""
        if data:
            self._show(header, data)
            return replace(header, lost_lines=0, goes_on=False)
        return header

    def _is_folded(self, header: Output, traceback: re.Match[bytes]) -> bool:
        """Whether another rank has just shown this traceback, or it is not to be shown; then its ranks are noted."""
        if self._folds_lost_peers and _is_lost_peer(traceback["exception"]):
            self._lost_peers.add(header.rank)
            return True
        key, now = (header.attempt, _identity(traceback[0])), time.monotonic()
        rank, shown_s = self._shown.get(key, (header.rank, 0.0))
        if rank != header.rank and now < shown_s + _ONE_EVENT_S:
            self._folded.setdefault(key, []).append(header.rank)
            return True
        self._shown = {key: shown for key, shown in self._shown.items() if now < shown[1] + _ONE_EVENT_S}
        self._shown[key] = header.rank, now
        return False


def _identity(traceback: bytes) -> bytes:
    """What two tracebacks of one event have in common. Ctrl-C interrupts each rank wherever it is."""
    text = _PREFIX.sub(b"", traceback)
    return b"KeyboardInterrupt\n" if text.endswith(b"\nKeyboardInterrupt\n") else text


def _is_lost_peer(exception: bytes) -> bool:
    return bool(_LOST_PEER.search(exception)) and is_peer_loss(exception.decode("utf-8", "replace"))


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    output = run.config.output
    return (TracebackFolder(run.messages.console, folds_lost_peers=output.keeps_files and output.verbosity < 1),)
