"""--ps and --kill over SSH: one table for all machines, the launcher's own included, and one end."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.nodes import Lab
from tests.support.processes import wait_until
from tests.support.runs import PROGRAMS, Finished, Running, start

pytestmark = pytest.mark.ssh

NODE_NOT_READY = 82


def on(lab: Lab, hosts: str, *arguments: str | Path) -> Running:
    """ddplaunch on the lab's machine for launchers."""
    env = {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    given = ("--hosts", hosts, "--ssh-config", lab.ssh_config, "-x", "DDPLAUNCH_TEST_MARK", "-x", "XDG_STATE_HOME")
    return start(*given, *arguments, under=lab.prefix, env=env)


def rows(finished: Finished, run_id: str) -> list[list[str]]:
    """State without its time, hosts and processes."""
    lines = [re.split(r"\s{2,}", line) for line in finished.out.splitlines()]
    return [[re.sub(r" [\dms]+$", "", line[1]), *line[3:5]] for line in lines if line[0] == run_id]


def test_a_run_on_two_nodes_is_one_row_and_ends_as_a_stopped_run(make_lab, tmp_path):
    lab = make_lab(3)
    lab["node3"].crash()
    run_id = f"two-{os.getpid()}"
    job = ("--nproc-per-node", "2", PROGRAMS / "rounds.py", tmp_path / "end")
    running = on(lab, "node[1-2]", "--rdzv-id", run_id, *job)
    running.wait_for("rank 0 of 4 in round 0")
    seen = on(lab, "node[1-3]", "--ps").finish()
    assert rows(seen, run_id) == [
        ["running", "lab,node[1-2]", "1 launcher, 2 agents, 2 forkservers, 1 store, 2 members, 4 workers"]
    ]
    assert seen.returncode == NODE_NOT_READY
    assert "some hosts could not be queried\n  node3: " in seen.err
    killed = on(lab, "node[1-2]", "--kill", run_id).finish()
    assert killed.returncode == 0, killed.err
    assert "lab: ended 1 launcher" in killed.err
    assert running.finish().returncode == 128 + signal.SIGTERM
    assert not lab.leftovers()


def test_what_is_left_on_nodes_is_found_and_ended_once_whatever_names_they_are_given(make_lab):
    lab = make_lab(2)
    with lab.ssh_config.open("a") as file:
        file.write(lab.config_of(lab["node1"], "again"))
    run_id = f"left-{os.getpid()}"
    running = on(lab, "node[1-2]", "--rdzv-id", run_id, "--nproc-per-node", "1", PROGRAMS / "escape.py", "wait")
    running.wait_for(r"ready \(pid", 2)
    agents = [pid for node in lab.nodes for pid, line in node.pids().items() if "DDPLAUNCH_START" in line]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (running.pid, *agents):
            os.kill(pid, signum)
    running.finish()
    for node in lab.nodes:
        wait_until(lambda node=node: len(node.pids()) == 5, 10, f"{node.pids()}")
    assert rows(on(lab, "node[1-2]", "--ps").finish(), run_id) == [["left over", "node[1-2]", "10 others"]]
    killed = on(lab, "node[1-2],again", "--kill", run_id, "--shutdown-timeout", "0.2").finish()
    assert killed.returncode == 0, killed.err
    assert "node[1-2]: ended 5 others" in killed.err
    assert not lab.leftovers()
