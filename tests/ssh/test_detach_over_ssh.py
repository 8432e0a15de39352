"""A run is started with --detach over SSH, looked at over SSH, and seen from a host that only shares its folder."""

from __future__ import annotations

import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.detached import JOB, UNTIL
from tests.support.nodes import Lab
from tests.support.processes import wait_until
from tests.support.runs import Finished, Running, command, environment
from tests.support.screen import CTRL_C, Screen

pytestmark = pytest.mark.ssh

CODE, LEFT, USAGE = 7, 130, 2


def ssh(lab: Lab, host: str, *arguments: str | Path, options: tuple[str, ...] = (), **popen: int) -> Running:
    """``ssh HOST ddplaunch ...``, as a person types it in the lab."""
    names = ("PYTHONPATH", "XDG_STATE_HOME", "DDPLAUNCH_TEST_MARK", "DDPLAUNCH_PAGE")
    given = {name: value for name, value in environment().items() if name in names}
    line = shlex.join(["env", *(f"{name}={value}" for name, value in given.items()), *command(*arguments)])
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
    return Running(lab.popen(["ssh", *options, "-F", lab.ssh_config, host, line], **streams))


def done(lab: Lab, host: str, *arguments: str | Path) -> Finished:
    return ssh(lab, host, *arguments).finish()


def viewers(lab: Lab, host: str) -> list[int]:
    return [pid for pid, line in lab[host].pids().items() if "--attach" in line]


def test_a_run_on_two_hosts_is_started_and_seen_over_ssh(make_lab, tmp_path: Path) -> None:
    lab, go, screen = make_lab(3), tmp_path / "go", Screen()
    hosts = ("--hosts", "node[1-2]", "--ssh-config", lab.ssh_config, "-x", "DDPLAUNCH_TEST_MARK")
    job = ("--rdzv-id", JOB, *hosts, "--nproc-per-node", "1", "--no-python", "sh", "-c", UNTIL, go)
    detached = done(lab, "node1", "--detach", *job)  # sshd closes the connection only if nobody has its pipes open.
    assert (detached.returncode, detached.out) == (0, f"{JOB}\n"), detached.err

    on_terminal = ssh(lab, "node1", "--attach", JOB, options=("-tt",), **screen.streams)
    for line in (b"[node1:0]", b"[node2:1]"):
        screen.wait_for(line)
    screen.type(CTRL_C)
    assert on_terminal.finish().returncode == LEFT
    assert f"left; the run goes on. Back: ddplaunch --attach {JOB}".encode() in screen.close()

    seen = {host: ssh(lab, host, "--attach", JOB) for host in ("node1", "node3")}
    asked = {option: ssh(lab, "node3", option, JOB) for option in ("--kill", "--stacks", "--leave")}
    for host, viewer in seen.items():
        viewer.wait_for("begins", 2)
        assert viewers(lab, host)
        viewer.signal(signal.SIGKILL)
        viewer.finish()
        wait_until(lambda host=host: not viewers(lab, host))  # type: ignore[misc]
    assert any(f"to end it: ssh node1 ddplaunch --kill {JOB}" in line for line in seen["node3"].error_lines)
    wait_until(lambda: "rank" in done(lab, "node3", "--ps", JOB).out)  # From the first sample on.
    for option, running in asked.items():
        refused = running.finish()
        assert refused.returncode == USAGE
        assert "its launcher is not on this machine but on node1" in refused.err, refused.err
        assert f"ssh node1 ddplaunch {option} {JOB}" in refused.err

    waiting = [ssh(lab, host, "--wait", JOB) for host in ("node1", "node3")]
    go.touch()
    assert [each.finish().returncode for each in waiting] == [CODE, CODE]
    wait_until(lambda: not lab.leftovers())
