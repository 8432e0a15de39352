"""``--on-exit``: runs the user's command when the run has ended, with the result in its environment.

Runs in the launcher, in the main thread, after the last worker has ended and all output is written. The command cannot
change the run's exit code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.launcher.display import failure_page
from ddplaunch.text import quote

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.config import LaunchConfig
    from ddplaunch.errors import LaunchError
    from ddplaunch.protocol.results import RunResult

LIMIT_S = 60.0
"""Seconds until the command is killed, with all processes of its session's process group."""

_POLL_S = 0.05
_KILLED_S = 2.0
"""Seconds for a killed command to end: it may wait for a file system that does not answer."""


def run(
    config: LaunchConfig,
    result: RunResult,
    error: LaunchError | None,
    show: Callable[[str, int], None],
    is_interrupted: Callable[[], bool],
) -> None:
    """Run the command and wait for its end; kill it after ``LIMIT_S``, or when ``is_interrupted()``.

    Where every node has a launcher, only that of node rank 0 runs it, and every one if no ranks were given.
    """
    if not config.on_exit or (config.rendezvous and config.rendezvous.node_index):
        return
    environ = {**os.environ, **variables(result, error)}
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", config.on_exit], env=environ, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except (OSError, ValueError) as failure:
        show(f"--on-exit: the command cannot be started: {failure}", Level.ALWAYS)
        return
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None:
        if time.monotonic() > deadline or is_interrupted():
            _kill(process)
            reason = (
                f"it did not end within {LIMIT_S:g} s" if time.monotonic() > deadline else "by a signal to ddplaunch"
            )
            show(f"--on-exit: {quote(config.on_exit)} was killed: {reason}", Level.ALWAYS)
            return
        time.sleep(_POLL_S)
    if process.returncode:
        show(f"--on-exit: {quote(config.on_exit)} ended with exit code {process.returncode}", Level.ALWAYS)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and its process group. One of another user, as of sudo, cannot be killed: it goes on."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)


def variables(result: RunResult, error: LaunchError | None) -> dict[str, str]:
    """The result as environment variables; docs/options.md lists them."""
    reason = error.message if error else failure_page.attempt_line(result.attempts[-1]) if result.attempts else ""
    first = result.first_failure
    return {
        "DDPLAUNCH_OUTCOME": result.outcome,
        "DDPLAUNCH_EXIT_CODE": str(result.exit_code),
        "DDPLAUNCH_EXIT_REASON": quote(reason, 1000) if result.outcome != "succeeded" else "",
        "DDPLAUNCH_FAILED_RANK": str(first.rank) if first else "",
        "DDPLAUNCH_FAILED_HOST": first.host if first else "",
        "DDPLAUNCH_RESTARTS": str(sum(attempt.restart_follows for attempt in result.attempts)),
        "DDPLAUNCH_RUN_NAME": result.run_id,
        "DDPLAUNCH_RUN_DIR": result.run_dir or "",
        "DDPLAUNCH_DURATION_S": f"{result.duration_s:.0f}",
    }
