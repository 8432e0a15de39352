"""Runs a command of a scheduler, as ``scontrol`` or ``bjobs``, in the launcher or a thread of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping


def run(timeout_s: float, *command: str, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The exit code of the command, and its stdout; after a failure its stderr, or why it has none.

    Blocks for at most ``timeout_s`` seconds. ``environ``: variables for it besides those of this process.
    """
    name = command[0]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            start_new_session=True,  # A signal for the process group of ddplaunch must not interrupt it.
            env={**os.environ, **(environ or {})},
        )
    except subprocess.TimeoutExpired:
        return 1, f"{name} did not answer within {timeout_s:g} s"
    except OSError as error:
        return 1, f"{name}: {error.strerror}"
    complaint = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
    return done.returncode, (complaint or f"{name} ended with {done.returncode}") if done.returncode else done.stdout
