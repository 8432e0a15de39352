"""Gives the user's terminal to one rank after the other of those that have stopped in a debugger.

Runs in the launcher, in the main thread. A rank keeps the terminal until it goes on; if it runs within its session
while others wait, it may need them, so the next one gets it. Lines of the job are held back meanwhile.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.features.debug import missing_terminal
from ddplaunch.features.debug.records import (
    GiveTerminal,
    RefuseTerminal,
    SessionChanged,
    SessionOpened,
    SessionOrder,
    SessionOutput,
    TypeKeys,
)
from ddplaunch.launcher.watches import Reply, RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol.control import LeaveTerminal, Request, RequestRefused
from ddplaunch.protocol.launcher_agent import AttemptStarted
from ddplaunch.system.signals import SignalReceived
from ddplaunch.text import escape, ranks
from ddplaunch.transport.handle import ChannelClosed

if TYPE_CHECKING:
    from ddplaunch.features.debug.terminal import Terminal

_SETTLE_S = 0.2
"""Time after the first stop in which other ranks may stop too: the lowest one begins."""

_BACKGROUND_S = 0.5
"""Time between two looks whether the user has brought this process to the foreground."""

_SHOWN_S = 0.3
"""Time between two ranks for the lines that were held back."""

_TWICE_S = 1.0
_CTRL_C = b"\x03"
_MAX_HIDDEN_BYTES = 64 << 10
_MAX_SESSIONS = 1 << 16

_KEYS = "c: the rank goes on; q: the job ends; Ctrl-C twice within a second: as Ctrl-C without a debugger"
_KEYS_POST_MORTEM = "q: the job ends, as it would have without the debugger"
_TIMEOUTS = (
    "meanwhile torch's own timeouts run: a rank that waits in a collective fails after 10 min (NCCL) or 30 min (gloo), "
    "unless the script sets more: init_process_group(timeout=...)"
)


class _Session:
    """A rank that has stopped in a debugger.

    Attributes:
        had_terminal: it had the terminal before another rank.
        hidden: what it has shown while another rank had the terminal.
    """

    def __init__(self, index: int, opened: SessionOpened) -> None:
        self.index, self.opened = index, opened
        self.is_running = self.had_terminal = False
        self.hidden = bytearray()

    @property
    def order(self) -> tuple[bool, int]:
        return not self.opened.is_post_mortem, self.opened.rank

    @property
    def who(self) -> str:
        return f"rank {self.opened.rank} on {self.opened.host}"


class Debugging(Watch):
    """The debug sessions of one run."""

    def __init__(self, run: RunServices) -> None:
        self._chosen, self._note, self._post = run.config.workers.debug_ranks, run.note, run.post
        self._nodes, self._shutdown, self._console = run.nodes, run.shutdown, run.messages.console
        self._noted: dict[tuple[int, int], tuple[float, SessionOpened]] = {}
        """All sessions that are open, and since when."""
        self._sessions: dict[tuple[int, int], _Session] = {}
        self._focus: _Session | None = None
        self._last_node = -1
        """Had the terminal last."""
        self._terminal: Terminal | None = None
        self._due = NEVER
        self._attempt = self._world_size = 0
        self._interrupted_at = -NEVER
        self._attempt_over = -1
        self._has_explained = self._is_announced = False
        self._column_is_0 = True

    def on_request(self, request: Request, reply: Reply) -> bool:
        """The terminal is not left while a rank has it, or waits for it."""
        if not self._sessions or not isinstance(request, LeaveTerminal):
            return False
        reply(RequestRefused("a rank has stopped in a debugger and needs it"))
        return True

    # Events.

    def on_event(self, index: int, event: object) -> None:
        """An event of node ``index``. Other events have no effect."""
        match event:
            case AttemptStarted(attempt=attempt, world_size=world_size) if attempt >= self._attempt:
                self._attempt, self._world_size = attempt, world_size
            case SessionOpened():
                self._note_opened((index, event.session), event)
                self._on_opened(_Session(index, event))
            case SessionChanged(session=number, state="over" | "quit" as state):
                self._note_closed((index, number), has_quit=state == "quit")
                if (index, number) in self._sessions:
                    self._on_closed((index, number), has_quit=state == "quit")
            case ChannelClosed():
                for key in [key for key in self._sessions if key[0] == index]:
                    self._on_closed(key, has_quit=False)
            case SessionOutput() if session := self._sessions.get((index, event.session)):
                self._on_output(session, event.data)
            case SessionChanged() if session := self._sessions.get((index, event.session)):
                session.is_running = event.state == "running"
                self._due = min(self._due, time.monotonic())

    def _note_opened(self, key: tuple[int, int], opened: SessionOpened) -> None:
        self._noted[key] = time.time(), opened
        text = f"rank {opened.rank} stopped {opened.place}"
        self._note("debugger_opened", text, node=key[0], attempt=opened.attempt, rank=opened.rank)

    def _note_closed(self, key: tuple[int, int], *, has_quit: bool) -> None:
        if key in self._noted:
            opened_s, opened = self._noted.pop(key)
            facts = {"attempt": opened.attempt, "rank": opened.rank, "s": round(time.time() - opened_s, 3)}
            self._note("debugger_closed", "the user has quit" if has_quit else "", node=key[0], **facts)

    def _on_opened(self, session: _Session) -> None:
        if self._shutdown.in_progress:
            return  # It is stopped.
        if problem := self._refusal(session.opened.rank) or missing_terminal(self._console.stdout_fd):
            self._nodes.send_to(session.index, RefuseTerminal(session.opened.session, problem))
            return
        if len(self._sessions) >= _MAX_SESSIONS:
            return
        self._sessions[session.index, session.opened.session] = session
        stopped = sum(not each.is_running for each in self._sessions.values())
        is_last = stopped == self._world_size and not session.opened.is_post_mortem  # Its traceback comes first.
        self._due = min(self._due, time.monotonic() + (0.0 if is_last else _SETTLE_S))

    def _refusal(self, rank: int) -> str:
        """A node on another machine may say that any of its ranks has stopped, and would get what is typed."""
        return "" if self._chosen is None or rank in self._chosen else "--debug-ranks names other ranks"

    def _on_output(self, session: _Session, data: str) -> None:
        take = SessionOrder(session.opened.session, "send")
        with contextlib.suppress(ValueError):
            shown = base64.b64decode(data)
            if session is self._focus:
                self._follow(shown)
                self._console.raw(shown, lambda: self._nodes.send_to(session.index, take))
                return
            session.hidden += shown
            del session.hidden[:-_MAX_HIDDEN_BYTES]
        self._nodes.send_to(session.index, take)

    def _on_closed(self, key: tuple[int, int], *, has_quit: bool) -> None:
        session = self._sessions.pop(key)
        if session.opened.is_post_mortem:  # It ends, and the attempt with it.
            self._attempt_over = max(self._attempt_over, session.opened.attempt)
        if session is self._focus:
            self._focus, self._due = None, time.monotonic()
            if self._next() is None:
                self._end()
            self._console.raw(b"", lambda: self._leave(session))
        if has_quit:
            self._end()
            self._shutdown.on_quit(session.who)

    def _leave(self, session: _Session) -> None:
        self._nodes.send_to(session.index, SessionOrder(session.opened.session, "leave"))

    def _leave_all(self) -> None:
        """The run is stopped."""
        for session in self._sessions.values():
            self._leave(session)
        self._sessions.clear()
        self._end()

    # The terminal.

    def _on_keys(self, keys: bytes) -> None:
        """The user has typed something for the debugger."""
        session = self._focus
        if session is None:
            return
        if _CTRL_C in keys:
            now, before = time.monotonic(), self._interrupted_at
            self._interrupted_at = now
            if now - before < _TWICE_S or keys.count(_CTRL_C) > 1:
                self._end()
                self._shutdown.on_signal(SignalReceived(signal.SIGINT))
                return
        text = base64.b64encode(keys).decode("ascii")
        self._nodes.send_to(session.index, TypeKeys(session.opened.session, text))

    def _send_size(self) -> None:
        """A rank has the terminal now, or the terminal has another size."""
        session = self._focus
        if self._terminal and session:
            term = os.environ.get("TERM") or "dumb"
            order = GiveTerminal(session.opened.session, term if term.isprintable() else "dumb", *self._terminal.size)
            self._nodes.send_to(session.index, order)

    def run_due(self, now: float) -> float:
        """Give the terminal to the next rank if it is time. Returns when to call again."""
        if self._shutdown.in_progress:
            self._leave_all()
        elif now >= self._due:
            self._due = NEVER
            self._give_to_next(now)
        return self._due

    def _give_to_next(self, now: float) -> None:
        session = self._next()
        if session is self._focus and session is not None:
            return
        if session is None:
            self._end()
        elif not self._can_read():
            self._announce(session)
            self._due = now + _BACKGROUND_S
        else:
            self._give(session)

    def _next(self) -> _Session | None:
        """Who is to have the terminal: whoever has it, unless it runs while others wait."""
        waiting = [each for each in self._sessions.values() if each.opened.attempt > self._attempt_over]
        stopped = [each for each in waiting if not each.is_running]
        if self._focus and (not self._focus.is_running or not stopped):
            return self._focus
        return min(stopped or waiting, key=lambda each: each.order, default=None)

    def _can_read(self) -> bool:
        from ddplaunch.features.debug import terminal

        return terminal.is_in_foreground(0)

    def _announce(self, session: _Session) -> None:
        if not self._is_announced:
            self._is_announced = True
            self._console.show(
                f"ddplaunch: {session.who} stopped {session.opened.place}; it gets the terminal when ddplaunch is "
                "in the foreground"
            )

    def _give(self, session: _Session) -> None:
        from ddplaunch.features.debug.terminal import Terminal

        if self._terminal is None:
            post = self._post
            on_keys, on_resized = lambda data: post(partial(self._on_keys, data)), lambda: post(self._send_size)
            self._terminal = Terminal(0, self._console.stdout_fd, on_keys, on_resized)
        self._leave_screen(self._terminal)
        self._console.hold(is_held=False)
        self._console.flush()
        self._console.wait_shown(_SHOWN_S)
        self._terminal.take(drops_typed=session.index != self._last_node)
        self._console.hold(is_held=True)
        self._focus, self._last_node, self._is_announced = session, session.index, False
        lines = self._lines(session)
        self._console.raw("".join(f"ddplaunch: {line}\r\n" for line in lines).encode())
        self._console.note(f"ddplaunch: {lines[0]}")
        session.had_terminal = True
        self._send_size()
        if session.hidden:
            self._follow(bytes(session.hidden))
            self._console.raw(bytes(session.hidden))
            session.hidden.clear()

    def _follow(self, shown: bytes) -> None:
        self._column_is_0 = shown.endswith(b"\n")
        if self._terminal:
            self._terminal.modes.follow(shown)

    def _lines(self, session: _Session) -> list[str]:
        others = {each.opened.rank for each in self._sessions.values() if each is not session and not each.is_running}
        waiting = f"; {ranks(others)} {'waits' if len(others) == 1 else 'wait'} for it" if others else ""
        stopped = "" if session.had_terminal else f" stopped {session.opened.place} and"
        lines = [f"{session.who}{stopped} has the terminal{' again' * session.had_terminal}{waiting}"]
        if not self._has_explained:
            self._has_explained = True
            lines.append(_KEYS_POST_MORTEM if session.opened.is_post_mortem else _KEYS)
            is_choice = bool(others) and not session.opened.is_post_mortem
            lines += [self._choice(session)] if is_choice or self._chosen else []
            lines += [_TIMEOUTS] if self._world_size > 1 else []
        return list(map(escape, lines))

    def _choice(self, session: _Session) -> str:
        if self._chosen is not None:
            return f"--debug-ranks: only {ranks(self._chosen)} can stop in a debugger, the others go on"
        return f"with --debug-ranks {session.opened.rank} only this rank stops, and the others go on"

    def _end(self) -> None:
        """Nobody has the terminal any more."""
        self._focus, self._due = None, NEVER
        if self._terminal and self._terminal.is_raw:
            self._leave_screen(self._terminal, b"" if self._column_is_0 else b"\r\n")
            self._column_is_0 = True
            self._terminal.restore()
            self._console.hold(is_held=False)

    def _leave_screen(self, terminal: Terminal, end: bytes = b"") -> None:
        """Undo what the debugger has changed; what it has shown is then on the terminal.

        Another thread shows the messages on stderr: on the screen of a debugger like pudb they would vanish with it.
        """
        if terminal.is_raw:
            self._console.raw(terminal.modes.reset() + end)
            self._console.wait_raw(_SHOWN_S)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """In the ``with`` block this process is suspended: the terminal is as it was before."""
        had_terminal = self._focus is not None
        self._end()
        yield
        if had_terminal:
            self._due = time.monotonic()

    def on_loop_ended(self) -> None:
        """Restore the terminal for good."""
        self._sessions.clear()
        self._end()
        if self._terminal:
            self._terminal.close()


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher."""
    return (Debugging(run),)
