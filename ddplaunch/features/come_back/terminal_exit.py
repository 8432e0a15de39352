"""``--leave``: a run in the foreground becomes independent of its terminal, which can then be closed.

Runs in the launcher, in the main thread. The launcher keeps its session; it ignores SIGHUP and uses the terminal no
more. console.log goes on.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ddplaunch.protocol.control import RequestRefused, TerminalLeft
from ddplaunch.system import terminal

if TYPE_CHECKING:
    from ddplaunch.launcher.display.messages import UserMessages
    from ddplaunch.launcher.nodes import Nodes


def leave_terminal(nodes: Nodes, messages: UserMessages, *, is_debugged: bool) -> TerminalLeft | RequestRefused:
    """Leave the terminal, unless the run needs it; the answer to the request."""
    if not terminal.is_own or threading.current_thread() is not threading.main_thread():
        return RequestRefused("it was started by a Python program, which has the terminal")
    if is_debugged:
        return RequestRefused("a rank has stopped in a debugger and needs it")
    if not messages.has_workers:
        return RequestRefused("its workers have not started yet")
    if messages.worker_has_terminal(nodes.all[0].handle.inherited_fds):
        return RequestRefused("its only worker writes to the terminal itself (not with -t 3)")
    messages.left_terminal()
    terminal.leave()
    return TerminalLeft()
