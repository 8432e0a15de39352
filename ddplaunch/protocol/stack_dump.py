"""Python stacks of a worker: how they are requested when the job hangs, and where in the script a stack points.

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
"""Path of the agent's file for the stacks; the worker's bootstrap removes the variable before the script runs."""

FILE = "stacks.txt"
"""File in the worker's log folder that gets the stacks, once some were written."""

DUMP_S = 1.0
"""Time for the workers to write their stacks."""

_DEBUGGER = re.compile(r"/(?P<name>ipdb|pudb|pdb|bdb|pydevd|debugpy|remote_pdb)(?:\.py\"|/|_)")
_DEBUGGER_WAITS = re.compile(r" in (_?cmdloop|interaction|_?do_wait_suspend|wait_for_client)$", re.MULTILINE)
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+),? in (?P<name>.*)')
_WORKER_PACKAGE = re.escape(str(Path(__file__).parents[1] / "worker"))
_LIBRARY_PATH = re.compile(rf"/(site|dist)-packages/|/lib(64)?/python3[^/]*/|^{_WORKER_PACKAGE}/|^<")


def whereabouts(text: str) -> str:
    """The main thread's innermost frame in the user's script, and the innermost frame of all, from faulthandler's text.

    ``train.py:41 in step (all_reduce, distributed_c10d.py:3190)``; empty if there is no stack. faulthandler writes the
    newest thread first, so the main thread's frames are the last ones; of those the innermost comes first.
    """
    frames = _frames(text.rpartition("(most recent call first):")[2])
    if not frames:
        return ""
    script = _script_frame(frames)
    inside = "" if script is frames[0] else f" ({frames[0]['name']}, {_file_and_line(frames[0])})"
    return f"{_file_and_line(script)} in {script['name']}{inside}"


def main_thread(dump: str) -> str:
    """The frames of the main thread, which comes last in a dump."""
    return dump.rpartition("(most recent call first):")[2]


def debugger(dump: str) -> str:
    """Name of the debugger in which the main thread is, or in which another thread waits for a command; empty if none.

    Debuggers have threads of their own, which are there also while the script runs.
    """
    *others, main = dump.split("(most recent call first):")
    waiting = (thread for thread in others if _DEBUGGER_WAITS.search(thread))
    found = (_DEBUGGER.search(thread) for thread in (main, *waiting))
    return next((match["name"] for match in found if match), "")


def raised_at(traceback: str) -> str:
    """The innermost line in the user's script of an exception's traceback, like ``train.py:41``; empty without one."""
    frames = _frames(traceback.rpartition("Traceback (most recent call last):")[2])
    return _file_and_line(_script_frame(frames[::-1])) if frames else ""


def _frames(stack: str) -> list[re.Match[str]]:
    return [match for line in stack.splitlines() if (match := _FRAME.fullmatch(line))]


def _script_frame(frames: list[re.Match[str]]) -> re.Match[str]:
    """The first of ``frames``, innermost first, that is not in a library; otherwise the outermost."""
    return next((frame for frame in frames if not _LIBRARY_PATH.search(frame["path"])), frames[-1])


def _file_and_line(frame: re.Match[str]) -> str:
    return f"{os.path.basename(frame['path'])}:{frame['line']}"
