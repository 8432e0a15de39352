"""``ddplaunch.give_up`` and ``ddplaunch.avoid_this_node``: a script ends its worker and says what must not follow.

Runs in the worker, in any thread, and in any other process of the script; also where ddplaunch has not started it. Must
import nothing that takes time.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn

from ddplaunch.protocol import script_request


def give_up(reason: str) -> NoReturn:
    """End this worker, and the run: no restart follows, although ``--max-restarts`` may allow one.

    For failures that every attempt would meet again, such as a loss that is not a number or data that is missing. The
    failure page, the report and the exit code 93 of the run say so; ``reason`` is one line of up to 500 characters.

    In the main thread this raises SystemExit, so that ``finally`` blocks and atexit functions run; the request holds
    even if the script catches it and ends in another way, except with exit code 0. In any other thread, SystemExit
    would end only the thread: there it ends the process at once, without them.

    If ddplaunch has not started the script, it prints the reason to stderr and ends the process with 93 in the same
    way.

    Raises:
        SystemExit: with code 93; only in the main thread.
    """
    _ask("give_up", reason, f"gave up: {reason}")


def avoid_this_node(reason: str) -> NoReturn:
    """End this worker as failed; the attempt that follows does not use its node, and is no restart.

    For failures of this machine, such as wrong results of a GPU. The run ends if too few other nodes are left; its
    failure page then names the node. The exit code is 88. Otherwise as ``give_up``.

    Raises:
        SystemExit: with code 88; only in the main thread.
    """
    _ask("avoid_this_node", reason, f"asked to avoid this node: {reason}")


def _ask(kind: script_request.RequestKind, reason: str, shown: str) -> NoReturn:
    code = script_request.EXIT_CODES[kind]
    path = os.environ.get(script_request.VARIABLE, "")
    problem = _write(path, script_request.line(kind, str(reason))) if path else ""
    _print(f"ddplaunch: {shown}{problem}")
    if threading.current_thread() is threading.main_thread():
        raise SystemExit(code)
    _print_buffered()
    os._exit(code)


def _write(path: str, line: str) -> str:
    """Append the line to the file; the problem, for the user, if that fails: a disk may be full."""
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line)
    except OSError as error:
        return f" ({path}: {error.strerror})"
    return ""


def _print(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):  # Closed, or None: what is asked for counts all the same.
        return


def _print_buffered() -> None:
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        return
