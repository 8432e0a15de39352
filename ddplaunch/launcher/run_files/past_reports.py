"""What the run.json and report.json of an earlier run say, as sentences: its command, and why a worker has failed.

Used by all that show earlier runs. Pure; whatever the files hold, nothing is raised.
"""

from __future__ import annotations

import shlex

from ddplaunch.protocol import first_failure, stack_dump
from ddplaunch.system.files.run_json import Json, integer, text, words

_VERBS = {"hardware": "failed", "give_up": "gave up", "avoid_node": "asked to avoid its node"}


def command(known: Json) -> str:
    """The command line, quoted for a shell; empty if it is not known."""
    return shlex.join(words(known, "command")) or text(known, "script")


def failure(exit_: Json) -> str:
    """What a worker did, and why: ``failed: ValueError: no such dataset (train.py:12)``."""
    for key, verb in _VERBS.items():
        if reason := text(exit_, key):
            return f"{verb}: {reason}"
    return f"failed: {_message(exit_) or how(exit_)}"


def _message(exit_: Json) -> str:
    error = exit_.get("error")
    message = text(error, "message").strip() if isinstance(error, dict) else ""
    if not (isinstance(error, dict) and message):
        return ""
    at = stack_dump.raised_at(text(error, "traceback"))
    return message.splitlines()[0] + (f" ({at})" if at else "")


def how(exit_: Json) -> str:
    """How a worker's process has ended."""
    code, memory = integer(exit_, "returncode"), exit_.get("out_of_memory")
    if memory in ("yes", "perhaps"):
        return f"SIGKILL, {first_failure.KILLED_FOR_MEMORY[memory]}"
    return first_failure.describe(code) if code is not None and abs(code) < 1 << 31 else "it is not known how"
