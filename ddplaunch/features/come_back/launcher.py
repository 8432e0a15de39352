"""``--leave``: a run in the foreground becomes independent of its terminal, which can then be closed.

Runs in the launcher, in the main thread. The launcher keeps its session; it ignores SIGHUP and uses the terminal no
more. console.log goes on.
"""

from __future__ import annotations

import os
import signal
import threading

from ddplaunch.errors import Level
from ddplaunch.launcher.watches import Reply, RunServices, Watch
from ddplaunch.protocol.control import LeaveTerminal, Request, RequestGranted, RequestRefused
from ddplaunch.system import signals

_SHOW_S = 0.5
"""Seconds to wait for the output that is still shown."""


class TerminalExit(Watch):
    """Answers LeaveTerminal."""

    def __init__(self, run: RunServices) -> None:
        self._run = run

    def on_request(self, request: Request, reply: Reply) -> bool:
        """Leave the terminal, unless the run needs it."""
        if isinstance(request, LeaveTerminal):
            reply(self._leave())
            return True
        return False

    def _leave(self) -> RequestGranted | RequestRefused:
        messages = self._run.messages
        if not signals.owns_terminal or threading.current_thread() is not threading.main_thread():
            return RequestRefused("it was started by a Python program, which has the terminal")
        if not messages.has_workers:
            return RequestRefused("its workers have not started yet")
        if messages.worker_has_terminal(self._run.nodes.all[0].handle.inherited_fds):
            return RequestRefused("its only worker writes to the terminal itself (not with -t 3)")
        back = f"to come back: ddplaunch --attach {messages.run_id}"
        text = f"the run goes on without this terminal, which can be closed; {back}"
        messages.show(text, Level.NORMAL, kind="terminal_left")
        messages.console.wait_shown(_SHOW_S)
        messages.console.leave_terminal()
        _leave_terminal()
        return RequestGranted()


def _leave_terminal() -> None:
    """Ignore SIGHUP, and use /dev/null for the standard streams that are a terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        if os.isatty(fd):
            os.dup2(null, fd)
    os.close(null)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The parts of a run in the launcher."""
    return (TerminalExit(run),)
