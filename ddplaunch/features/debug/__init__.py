"""Debugging sessions: a rank of any node stops in a debugger, and the user's terminal is connected with it.

Parts in the launcher, the agent and the worker; ``records`` is what they say to each other. Only the worker's part
imports torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

EVENTS = {
    "debugger_opened": "a rank has stopped in a debugger, and waits for the terminal",
    "debugger_closed": "the rank goes on, or has ended, after `s` seconds in the debugger",
}


def rows() -> tuple[object, ...]:
    """``--debug-on-error``, ``--debug-ranks``."""
    from ddplaunch.rows import PYTHON, Option, flag, parse_ranks

    return (
        flag(
            "--debug-on-error",
            "The first rank that raises an exception stops in pdb (post-mortem) before the job ends. Needs a terminal. "
            "breakpoint() works without any option.",
            sets="workers.debug_on_error",
            only=(PYTHON,),
            after="--shutdown-timeout",
        ),
        Option(
            "--debug-ranks",
            "0,4-7",
            "Only these ranks stop in a debugger, by breakpoint() or --debug-on-error; the others go on. Default: all.",
            sets="workers.debug_ranks",
            parse=parse_ranks,
            only=(PYTHON,),
            after="--shutdown-timeout",
        ),
    )


def prepare(config: LaunchConfig, stdout_fd: int | None) -> LaunchConfig:
    """``--debug-on-error``: raise UsageError if the only launcher of the run has no terminal."""
    if not config.each_node_has_launcher and stdout_fd is not None and (problem := missing_terminal(stdout_fd)):
        hint = "Start the job in a terminal, without a pipe or a redirection, or leave the option out."
        raise UsageError(f"--debug-on-error needs a terminal: {problem}", hint, ("--debug-on-error",))
    return config


def missing_terminal(stdout_fd: int) -> str:
    """Why no debugger can have the terminal; empty if one can."""
    for name, fd in (("stdin", 0), ("stdout", stdout_fd)):
        if not os.isatty(fd):
            return f"{name} of ddplaunch is not one"
    return ""
