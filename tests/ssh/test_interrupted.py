"""Ctrl-C, once or several times, and the launcher's own death end a job over SSH at every stage, on every host."""

from __future__ import annotations

import os
import shutil
import signal
import sys

import pytest

from ddplaunch.errors import NODE_NOT_READY
from tests.support.nodes import NodeOptions
from tests.support.processes import wait_until
from tests.support.runs import PROGRAMS, Finished
from tests.support.ssh_jobs import agent, frozen, job, pid_on, rounds

pytestmark = pytest.mark.ssh

IGNORES = ("--no-python", sys.executable, PROGRAMS / "ignore_sigterm.py")
PRINTS = ("--no-python", sys.executable, PROGRAMS / "print_signals.py")


def assert_interrupted(finished: Finished) -> None:
    assert finished.returncode == 130, finished.err
    assert "stopped; every process of this run has ended" in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.usefixtures("slow_import")
def test_ctrl_c_works_while_nodes_wait_for_each_other(make_lab, tmp_path):
    lab = make_lab(2)
    running = rounds(lab, tmp_path / "end", "--verbose")
    with frozen(pid_on(lab["node2"], "forkserver")):
        running.wait_for("waiting at .* for 1 more node; here: node1")
        running.signal(signal.SIGINT)
        assert_interrupted(running.finish(30))
        assert not lab.leftovers()


@pytest.mark.parametrize("setup", ["sleep 500", "trap '' TERM; sleep 500 & wait"])
def test_it_ends_what_remote_setup_runs(setup, make_lab):
    lab = make_lab(2, node2=NodeOptions(shell=shutil.which("dash")))
    running = job(lab, "--nproc-per-node", "1", "--remote-setup", setup, *PRINTS)
    for node in lab.nodes:
        wait_until(lambda node=node: any(line == "sleep 500" for line in node.pids().values()))
    running.signal(signal.SIGINT)
    assert running.finish(30).returncode == 130
    wait_until(lambda: not lab.leftovers(), 10)


def test_a_remote_setup_that_takes_too_long_is_ended(make_lab):
    lab = make_lab(2)
    setup = ("--remote-setup", "sleep 500", "--start-timeout", "2")
    finished = job(lab, "--nproc-per-node", "1", *setup, *PRINTS).finish(30)
    assert finished.returncode == NODE_NOT_READY, finished.err
    wait_until(lambda: not lab.leftovers(), 10)


def test_more_of_them_shorten_the_grace_of_workers_that_do_not_end(make_lab):
    lab = make_lab(2)
    running = job(lab, "--nproc-per-node", "1", "--shutdown-timeout", "600", *IGNORES)
    running.wait_for(r"ready \(pid", 2)
    for grace in ("in 600 s", "in 5 s", "at once"):
        running.signal_again(signal.SIGINT)
        running.wait_for(f"SIGINT: stopping the workers.*, SIGKILL {grace}")
    assert_interrupted(running.finish(30))
    assert not lab.leftovers()


def test_the_second_one_wakes_an_agent_that_is_stopped(make_lab):
    lab = make_lab(2)
    running = job(lab, "--nproc-per-node", "1", *PRINTS)
    running.wait_for(r"ready \(pid", 2)
    os.kill(agent(lab, "node2"), signal.SIGSTOP)
    for grace in ("30", "5"):
        running.signal_again(signal.SIGINT)
        running.wait_for(f"stopping the workers.*, SIGKILL in {grace} s")
    finished = running.finish(30)
    assert_interrupted(finished)
    assert finished.out.count("got SIGINT") == 2


@pytest.mark.usefixtures("slow_import")
def test_a_launcher_that_is_killed_while_nodes_wait_leaves_nothing(make_lab, tmp_path):
    lab = make_lab(2)
    running = rounds(lab, tmp_path / "end", "--verbose")
    with frozen(pid_on(lab["node2"], "forkserver")):
        running.wait_for("waiting at .* for 1 more node; here: node1")
        running.signal(signal.SIGKILL)
        running.finish()
        wait_until(lambda: not lab.leftovers(), 15)


def test_a_launcher_that_is_killed_while_it_stops_the_workers_leaves_nothing(make_lab):
    lab = make_lab(2)
    running = job(lab, "--nproc-per-node", "1", "--shutdown-timeout", "1", *IGNORES)
    running.wait_for(r"ready \(pid", 2)
    running.signal(signal.SIGINT)
    running.wait_for("stopping the workers")
    running.signal(signal.SIGKILL)
    running.finish()
    wait_until(lambda: not lab.leftovers(), 15)
