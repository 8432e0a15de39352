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

from ddplaunch.errors import LaunchError, Level
from ddplaunch.launcher.display import failure_page
from ddplaunch.launcher.watches import RunEnd, RunServices, Watch
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.protocol.run_result import RunResult

LIMIT_S = 60.0
"""Seconds until the command is killed, with all processes of its session's process group."""

_POLL_S = 0.05
_KILLED_S = 2.0
"""Seconds for a killed command to end: it may wait for a file system that does not answer."""


class OnExit(Watch):
    """Runs the command when all else has ended.

    Where each node has a launcher, only that of node rank 0 runs it, and every one if no ranks were given.
    """

    def __init__(self, run: RunServices) -> None:
        self._command, self._messages = run.config.on_exit or "", run.messages

    def finish(self, end: RunEnd) -> None:
        """Run the command and wait for its end; kill it after ``LIMIT_S``, or when the user does not want to wait."""
        if problem := self._problem(end):
            self._messages.show(f"--on-exit: {problem}", Level.ALWAYS)
        self._messages.drain(end.result, end.is_interrupted)

    def _problem(self, end: RunEnd) -> str:
        """Run the command. Returns what the user must know of it."""
        environ = {**os.environ, **result_variables(end.result, end.error)}
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._command], env=environ, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except (OSError, ValueError) as failure:
            return f"the command cannot be started: {failure}"
        deadline = time.monotonic() + LIMIT_S
        while process.poll() is None:
            if (is_late := time.monotonic() > deadline) or end.is_interrupted():
                _kill(process)
                reason = f"it did not end within {LIMIT_S:g} s" if is_late else "by a signal to ddplaunch"
                return f"{quote(self._command)} was killed: {reason}"
            time.sleep(_POLL_S)
        return f"{quote(self._command)} ended with exit code {process.returncode}" if process.returncode else ""


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and its process group. One of another user, as of sudo, cannot be killed: it goes on."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_S)


def result_variables(result: RunResult, error: LaunchError | None) -> dict[str, str]:
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


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher, unless another launcher runs the command."""
    rendezvous = run.config.rendezvous
    return () if rendezvous and rendezvous.node_index else (OnExit(run),)
