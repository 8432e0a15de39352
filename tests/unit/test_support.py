"""The helpers of the tests see what they say they see."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.processes import (
    children,
    command_line,
    ignores,
    is_alive,
    pass_on_no_ignored_signals,
    peak_mb,
    pids_with,
    state,
    wait_until,
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the mark ``SLEEPER=`` and our pid, handles SIGUSR1, ignores SIGUSR2 and has said so."""
    program = (
        "import signal as s; s.signal(10, print); s.signal(12, s.SIG_IGN); print(flush=True); s.pause(); s.pause()"
    )
    command = [sys.executable, "-S", "-c", program, "an argument"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "SLEEPER": str(os.getpid())})
    assert process.stdout
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_program_of_a_test_ignores_no_signal_that_the_shell_ignores() -> None:
    before = {
        signum: signal.signal(signum, signal.SIG_IGN) for signum in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    }
    try:
        pass_on_no_ignored_signals()
        with subprocess.Popen(
            [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as child:
            assert not [signum for signum in before if ignores(child.pid, signum)]
            for signum in before:
                os.kill(os.getpid(), signum)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_a_living_process_is_seen(sleeper: subprocess.Popen[bytes]) -> None:
    assert is_alive(sleeper.pid)
    assert state(sleeper.pid) in ("S", "R")
    assert sleeper.pid in children(os.getpid())
    assert command_line(sleeper.pid).endswith("an argument")
    assert 1 < peak_mb(sleeper.pid) < 500
    mark = f"SLEEPER={os.getpid()}"
    assert pids_with(mark) == [sleeper.pid]
    assert pids_with("SLEEPER=no") == pids_with("SLEEPER") == pids_with(mark[1:]) == []


def test_a_zombie_counts_as_gone(sleeper: subprocess.Popen[bytes]) -> None:
    os.kill(sleeper.pid, signal.SIGKILL)
    wait_until(lambda: state(sleeper.pid) == "Z")
    assert not is_alive(sleeper.pid)
    assert sleeper.pid not in children(os.getpid())
    assert pids_with(f"SLEEPER={os.getpid()}") == []
    assert command_line(sleeper.pid) == ""
