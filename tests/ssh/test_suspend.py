"""Ctrl-Z of a launcher whose agents are on other machines, where silence means that it is gone."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.processes import wait_until
from tests.support.runs import start

pytestmark = pytest.mark.ssh

COUNT = """
import os, sys, time
for number in range(200):
    print(number, file=open(sys.argv[1], "w"))
    time.sleep(0.1)
    if os.path.exists(sys.argv[2]):
        break
print("counted")
"""
LOST_AFTER_S = 5


@pytest.mark.slow
def test_workers_run_on_while_the_launcher_is_suspended(make_lab, tmp_path: Path) -> None:
    lab = make_lab(2)
    counter, end = tmp_path / "counter", tmp_path / "end"
    running = start(
        *("--hosts", "node1,node2", "--ssh-config", lab.ssh_config, "--nnodes", "2", "-x", "DDPLAUNCH_TEST_MARK"),
        *("--no-python", sys.executable, "-c", COUNT, counter, end),
        under=lab.prefix,
        env={"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]},
        preexec_fn=os.setpgrp,  # The kernel stops only who has a parent that could continue it.
    )
    before = wait_until(lambda: counter.exists() and counter.read_text().strip(), 30)
    running.signal(signal.SIGTSTP)
    wait_until(lambda: _state(running.pid) == "T")
    wait_until(lambda: int(counter.read_text().strip() or 0) > int(before) + 10 * (LOST_AFTER_S + 2), 30)
    assert _state(running.pid) == "T"
    running.signal(signal.SIGCONT)
    end.touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err
    assert finished.out.count("counted") == 2


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
