"""A rank on another machine stops in a debugger: its user types at the launcher's terminal."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.debugging import STOP, Debugger
from tests.support.processes import wait_until
from tests.support.ssh_jobs import agent, job

pytestmark = pytest.mark.ssh

ON_TERMINAL = ("setsid", "--ctty")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(STOP)
    return path


def test_ranks_of_two_hosts_have_the_terminal_in_turn(make_lab, screen: Debugger, script: Path) -> None:
    lab, two = make_lab(2), ("--nproc-per-node", "2")
    running = job(lab, *two, script, "1", "2", "3", under=ON_TERMINAL, extra={"TERM": "vt100"}, **screen.streams)
    assert b"rank 1 on node1 stopped at breakpoint() (job.py:7) and has the terminal" in screen.prompted()
    assert b"\n42\n" in screen.say("p 4000\x7f\x7f\x7f2")
    assert b"rank 2 on node2 stopped" in screen.say("c")
    assert b"rank 3 on node2 stopped" in screen.say("c")
    assert b"'vt100 node2'" in screen.say("p __import__('os').environ['TERM'] + ' ' + __import__('os').uname()[1]")
    screen.enter("q")
    assert running.finish(20).returncode == 130
    assert screen.settings() == screen.before
    assert not re.search(rb"BdbQuit|failed", screen.close())


def test_a_lost_host_gives_the_terminal_back(make_lab, screen: Debugger, script: Path) -> None:
    lab = make_lab(2)
    running = job(lab, "--nproc-per-node", "1", script, "1", under=ON_TERMINAL, **screen.streams)
    screen.prompted()
    os.kill(agent(lab, "node2"), signal.SIGKILL)
    assert running.finish().returncode == 84
    assert screen.settings() == screen.before
    wait_until(lambda: not [line for line in lab["node2"].pids().values() if "job.py" in line])
