"""Where a worker is when the job hangs: the signal that has it write its Python stacks, and what they say. Pure.

faulthandler writes them from a C signal handler, so that it works in a loop, in a call that holds the GIL and in one
that waits for ever; not in uninterruptible sleep.
"""

from __future__ import annotations

import os
import re
import signal

SIGNUM = signal.SIGRTMIN + 11
"""Not one that scripts or libraries use: a signal that is merely caught does not end what it finds."""

VARIABLE = "DDPLAUNCH_STACKS_FILE"
"""Tells a worker's bootstrap which file the stacks go to, and is gone before the script runs."""

FILE = "stacks.txt"
DUMP_S = 1.0
"""What writing them may take."""

_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')
_OF_A_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[^/]*/|/ddplaunch/worker/|^<")


def whereabouts(text: str) -> str:
    """Where the main thread is, of what faulthandler wrote: innermost frame of the script's own, and what it is in.

    ``train.py:41 in step (all_reduce, distributed_c10d.py:3190)``; empty where there is no stack. faulthandler writes
    the newest thread first, so the main thread's frames are the last ones; of those the innermost comes first.
    """
    main_thread = text.rpartition("(most recent call first):")[2]
    frames = [match for line in main_thread.splitlines() if (match := _FRAME.fullmatch(line))]
    if not frames:
        return ""
    own = next((frame for frame in frames if not _OF_A_LIBRARY.search(frame["path"])), frames[-1])
    inside = "" if own is frames[0] else f" ({frames[0]['name']}, {_place(frames[0])})"
    return f"{_place(own)} in {own['name']}{inside}"


def _place(frame: re.Match[str]) -> str:
    return f"{os.path.basename(frame['path'])}:{frame['line']}"
