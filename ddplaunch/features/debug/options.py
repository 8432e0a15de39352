"""``--debug-on-error`` needs a terminal. Runs in the launcher, before anything is started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.errors import UsageError

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig


def prepare(config: LaunchConfig, stdout_fd: int | None) -> LaunchConfig:
    """Before the run: raise UsageError if its only launcher has no terminal."""
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
