"""Python stacks of a worker when the job hangs: the signal that requests them, their file, and a summary of their text.

Used by the agent and the worker's bootstrap. Pure. faulthandler writes the stacks from a C signal handler, which also
works in an endless loop, in a call that holds the GIL and in a call that blocks for ever, but not in uninterruptible
sleep.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

SIGNUM = signal.SIGRTMIN + 11
"""A real-time signal that scripts and libraries do not use."""

VARIABLE = "DDPLAUNCH_STACKS_FILE"
"""Path of the file for the stacks; the worker's bootstrap removes the variable before the script runs."""

FILE = "stacks.txt"
DUMP_S = 1.0
"""Time for the workers to write their stacks."""

_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<name>.*)')
_WORKER_PACKAGE = re.escape(str(Path(__file__).parents[1] / "worker"))
_LIBRARY_PATH = re.compile(rf"/(site|dist)-packages/|/lib(64)?/python3[^/]*/|^{_WORKER_PACKAGE}/|^<")


def whereabouts(text: str) -> str:
    """The main thread's innermost frame in the user's script, and the innermost frame of all, from faulthandler's text.

    ``train.py:41 in step (all_reduce, distributed_c10d.py:3190)``; empty if there is no stack. faulthandler writes the
    newest thread first, so the main thread's frames are the last ones; of those the innermost comes first.
    """
    main_thread = text.rpartition("(most recent call first):")[2]
    frames = [match for line in main_thread.splitlines() if (match := _FRAME.fullmatch(line))]
    if not frames:
        return ""
    script = next((frame for frame in frames if not _LIBRARY_PATH.search(frame["path"])), frames[-1])
    inside = "" if script is frames[0] else f" ({frames[0]['name']}, {_file_and_line(frames[0])})"
    return f"{_file_and_line(script)} in {script['name']}{inside}"


def _file_and_line(frame: re.Match[str]) -> str:
    return f"{os.path.basename(frame['path'])}:{frame['line']}"
