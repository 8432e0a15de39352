"""Runs SLURM's ``scontrol``, before, during and after a run."""

from __future__ import annotations

import os
import subprocess


def run(timeout_s: float, *arguments: str, seconds: bool = False) -> tuple[int, str]:
    """The exit code of scontrol, and its stdout; after a failure its stderr.

    Blocks for at most ``timeout_s`` seconds. ``seconds``: times are printed in seconds since the epoch.
    """
    try:
        done = subprocess.run(
            ("scontrol", *arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            start_new_session=True,  # SLURM's signals to the requeued job must not interrupt it.
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"} if seconds else None,
        )
    except subprocess.TimeoutExpired:
        return 1, f"scontrol did not answer within {timeout_s:g} s"
    except OSError as error:
        return 1, f"scontrol: {error.strerror}"
    complaint = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
    return done.returncode, (complaint or f"scontrol ended with {done.returncode}") if done.returncode else done.stdout
