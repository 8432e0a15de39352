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

from ddplaunch.errors import Level
from ddplaunch.launcher.watches import RunEnd, RunServices, Watch
from ddplaunch.protocol.first_failure import is_peer_loss
from ddplaunch.protocol.output_runs import runs_of
from ddplaunch.text import quote, ranks

if TYPE_CHECKING:
    from ddplaunch.launcher.display.messages import UserMessages
    from ddplaunch.protocol.launcher_agent import Output
    from ddplaunch.transport.handle import WriteOutput

_HOLD_S = 0.5
_ONE_EVENT_S = 5.0
"""Equal tracebacks of different ranks within this time are of one event."""

_MAX_HELD_BYTES = 1 << 18

_RANK = rb"(?:\[rank\d+\]: )?"  # Of torch's excepthook.
_TITLE = rb"Traceback \(most recent call last\):\n"
_BEGIN = re.compile(rb"^" + _RANK + _TITLE, re.MULTILINE)
_MORE_OF_NCCL = rb"(?:" + _RANK + rb"nccl\w+Error: .*\n|" + _RANK + rb"Last error:\n" + _RANK + rb".*\n)*"
_ONE = _RANK + _TITLE + rb"(?:" + _RANK + rb"(?:[ \t].*)?\n)*" + _RANK + rb"(?!\[rank\d+\]: )(\S.*\n)" + _MORE_OF_NCCL
_LINKS = (
    b"\nDuring handling of the above exception, another exception occurred:\n\n",
    b"\nThe above exception was the direct cause of the following exception:\n\n",
)
_LINK = rb"|".join(link.replace(b"\n", rb"\n" + _RANK) for link in _LINKS)
_MAX_LINK_BYTES = 256
"""Longer than a link with a rank in front of each line."""

_CHAIN = re.compile(rb"%b(?:%b(?:%b)%b)*" % (_ONE, _RANK, _LINK, _ONE))
_EXCEPTIONS = re.compile(_ONE)
_PREFIX = re.compile(rb"^" + _RANK, re.MULTILINE)

_LOST_PEER = re.compile(rb"\.cc:\d+\] |torch\.distributed\.Dist\w+Error")
"""In the exceptions of gloo, NCCL and the store, and not in those of a script that has lost another server."""

_IN_THREAD = re.compile(rb"^Exception in thread .*:\n", re.MULTILINE)
"""Python's line about an exception that has ended another thread than the main one; its traceback follows."""

_Key = tuple[int, bytes]


class TracebackFolder(Watch):
    """Shows output without tracebacks that another rank has just shown, and names these ranks.

    With ``folds_lost_peers`` also without those of ranks that have lost a peer. After a success it names ranks of which
    an exception has ended a thread.
    """

    def __init__(self, messages: UserMessages, *, folds_lost_peers: bool) -> None:
        self._messages, self._console = messages, messages.console
        self._folds_lost_peers = folds_lost_peers
        self._lock = threading.Lock()
        self._held: dict[tuple[int, int], tuple[Output, bytes]] = {}
        """By attempt and rank: the rank of the next attempt may be on another node."""
        self._shown: dict[_Key, tuple[int, float]] = {}
        self._folded: dict[_Key, list[int]] = {}
        self._lost_peers: set[int] = set()
        self._is_timed = False
        self._lost_threads: set[tuple[int, int]] = set()
        """Attempt and rank."""

    def on_output(self, write: WriteOutput) -> WriteOutput:
        """Fold the tracebacks on stderr."""
        self._show = write
        self._console.flushes.append(self.flush)

        def fold(header: Output, data: bytes) -> None:
            may_be = header.stream == "stderr" or header.runs  # A flood of stdout is not searched.
            if may_be and b"Exception in thread " in data and _IN_THREAD.search(data):
                self._lost_threads.add((header.attempt, header.rank))
            if header.runs and not self._held and b"Traceback (" not in data:
                write(header, data)
                return
            for run in runs_of(header, data):
                fold_run(*run)

        def fold_run(header: Output, data: bytes) -> None:
            if header.stream == "stdout" or self._console.is_plain:
                self._release(header)  # The lines of a rank keep their order.
                write(header, data)
            else:
                self._fold(header, data)

        return fold

    def on_run_ended(self, end: RunEnd) -> None:
        """Say that the run has succeeded although a thread has not."""
        last = end.result.attempts[-1:] if end.result.outcome == "succeeded" else ()
        if found := [rank for attempt, rank in self._lost_threads for each in last if attempt == each.attempt]:
            text = f"{ranks(found)}: a thread ended with an exception; the exit code is that of the main thread"
            self._messages.show(text, Level.NORMAL)

    def _fold(self, header: Output, data: bytes) -> None:
        """Show ``data``, or hold back its end if that may be part of a traceback to fold. Does not block."""
        with self._lock:
            if before := self._held.pop((header.attempt, header.rank), None):
                header = replace(before[0], lost_lines=before[0].lost_lines + header.lost_lines)
                data = before[1] + data
            self._pass_on(header, data)
            if (self._held or self._folded or self._lost_peers) and not self._is_timed:
                self._start_timer()

    def _release(self, header: Output) -> None:
        with self._lock:
            if before := self._held.pop((header.attempt, header.rank), None):
                self._pass_on(*before, is_all=True)

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
        held, self._held = self._held, {}
        for header, data in held.values():
            self._pass_on(header, data, is_all=True)
        for (_, text), folded in self._folded.items():
            exception = text.rstrip().rpartition(b"\n")[2].decode("utf-8", "replace")
            self._console.show(f"ddplaunch: {ranks(folded)}: the same traceback ({quote(exception)})")
        if self._lost_peers:
            who = f"{ranks(self._lost_peers)} lost a peer or did not reach it"
            line = f"{who}; tracebacks are in the logs, and shown with -v"
            self._console.show(f"ddplaunch: {line}")
        self._folded.clear()
        self._lost_peers.clear()

    def _pass_on(self, header: Output, data: bytes, *, is_all: bool = False) -> None:
        """``is_all``: nothing more of a traceback at the end of ``data`` is waited for."""
        while begin := _BEGIN.search(data):
            whole = _CHAIN.match(data, begin.start())
            goes_on = whole is None or _may_go_on(data[whole.end() :])
            if goes_on and not is_all and len(data) < _MAX_HELD_BYTES:
                header = self._show_part(header, data[: begin.start()])
                self._held[header.attempt, header.rank] = header, data[begin.start() :]
                return
            end = whole.end() if whole else len(data)
            is_folded = whole is not None and self._is_folded(header, whole[0])
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

    def _is_folded(self, header: Output, traceback: bytes) -> bool:
        """Whether another rank has just shown this traceback, or it is not to be shown; then its ranks are noted."""
        if self._folds_lost_peers and all(map(_is_lost_peer, _EXCEPTIONS.findall(traceback))):
            self._lost_peers.add(header.rank)
            return True
        key, now = (header.attempt, _identity(traceback)), time.monotonic()
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


def _may_go_on(rest: bytes) -> bool:
    """Whether ``rest``, behind a traceback, may be the beginning of more of it: of a chain, or of what NCCL adds."""
    text = _PREFIX.sub(b"", rest[:_MAX_LINK_BYTES])
    first, *more = text.split(b"\n")
    is_cut_off = not more or (first == b"Last error:" and len(more) == 1)
    begins_nccl = any(begin.startswith(first) or first.startswith(begin) for begin in (b"nccl", b"Last error:"))
    return (is_cut_off and begins_nccl) or any(link.startswith(text) or text.startswith(link) for link in _LINKS)


def _is_lost_peer(exception: bytes) -> bool:
    return bool(_LOST_PEER.search(exception)) and is_peer_loss(exception.decode("utf-8", "replace"))


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    output = run.config.output
    return (TracebackFolder(run.messages, folds_lost_peers=output.keeps_files and output.verbosity < 1),)
