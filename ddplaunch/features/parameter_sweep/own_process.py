"""The jobs of a program that has called ``launch``, in a process of their own: a fork of a program may not be safe."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.config import LaunchConfig
from ddplaunch.errors import LaunchError
from ddplaunch.features.parameter_sweep import results, run_jobs
from ddplaunch.protocol import wire
from ddplaunch.protocol.agent_entry import IMPORT_PACKAGE, PACKAGE_ROOT
from ddplaunch.system import linux

if TYPE_CHECKING:
    from ddplaunch.features.parameter_sweep.results import SweepResult

_START = f"{IMPORT_PACKAGE}; from {__name__} import main; main(*sys.argv[1:])"


def run(config: LaunchConfig, run_id: str, folder: Path, stdout_fd: int) -> SweepResult:
    """As ``run_jobs.run``. In the main thread, signals to this process stop the jobs.

    Raises:
        LaunchError: the process has ended without a result.
    """
    words = [sys.executable, "-c", _START, PACKAGE_ROOT, run_id, str(folder), str(os.getpid())]
    # A session of its own: of a Ctrl-C it gets what this process passes on.
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=stdout_fd, start_new_session=True) as process:
        assert process.stdin
        with _passed_on(process), process.stdin:
            process.stdin.write(wire.encode(config))
            process.stdin.close()
            process.wait()
    result = results.read(folder)
    if result is None:
        raise LaunchError(f"the jobs have no result: their process ended with returncode {process.returncode}")
    return result


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [signum for signum in run_jobs.SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, lambda number, _: process.send_signal(number)) for signum in handled}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def main(run_id: str, folder: str, parent: str) -> None:
    """In that process: read the configuration, run the jobs, and exit."""
    linux.die_with_parent(int(parent), signal.SIGTERM)
    config = wire.decode(sys.stdin.buffer.read(), (LaunchConfig,))
    sys.exit(run_jobs.run(config, run_id, Path(folder), is_detached=False).exit_code)
