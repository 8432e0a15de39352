"""stdout of a command that follows a run: a terminal, or a pipe whose reader may be slow, or may have gone.

Runs in the process that the user started. Writes to the descriptor: nothing is held back in a buffer.
"""

from __future__ import annotations

import errno
import os
import select


def write(data: bytes) -> None:
    """Write all of ``data``, however long that takes.

    Raises:
        OSError: it cannot be written; BrokenPipeError: nobody reads it any more.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(1, view) :]
        except BlockingIOError:  # Another process made the terminal or pipe non-blocking, as ssh does.
            select.select([], [1], [])


def pause(seconds: float) -> None:
    """Wait, but end where nobody reads stdout any more: a run without output would keep its viewers for ever.

    Raises:
        BrokenPipeError: the reader of the pipe, or the terminal, has gone.
    """
    poll = select.poll()
    poll.register(1, 0)  # poll(2): errors and hang-ups are reported without being asked for.
    if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(seconds * 1000)):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
