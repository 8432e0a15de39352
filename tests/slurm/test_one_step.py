"""One srun starts the agents of all nodes, which connect to the launcher: what it is, and what can go wrong."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from ddplaunch.errors import NODE_LOST, NODE_NOT_READY
from ddplaunch.features.slurm import scontrol
from tests.process.test_nodes_meet import SUM, WAIT
from tests.slurm.test_allocation import launcher_pid, salloc
from tests.slurm.test_srun import sums
from tests.support import nodes
from tests.support.processes import children, command_line, wait_until
from tests.support.runs import TIMEOUT_S, Running, command
from tests.support.slurm import ASK_S, Slurm

pytestmark = pytest.mark.slurm

COUNT = "srun --overlap --nodes=1 --ntasks=1 printenv SLURM_STEP_ID"
"""The number of steps that the job has had before this one."""

SLEEP = ("--nproc-per-node", "1", "--no-python", "sh", "-c", "echo begins; exec sleep 1000")


def in_job(slurm: Slurm, nodes: str, *lines: str, env: dict[str, str] | None = None) -> Running:
    """A job whose shell runs these lines."""
    own = {"OMP_NUM_THREADS": "1", **(env or {})}
    return slurm.start(["salloc", *nodes.split(), "--quiet", "sh", "-c", "\n".join(lines)], env=own)


def line(*arguments: str | Path) -> str:
    return shlex.join(command(*map(str, arguments)))


def steps(slurm: Slurm) -> list[str]:
    """The ids of the steps that run."""
    return slurm.run("squeue", "--steps", "--noheader", "--format=%i").split()


def started(slurm: Slurm, node: str) -> str:
    """When the node's slurmd has started, as SLURM knows it."""
    return scontrol.field(slurm.run("scontrol", "show", "node", node, "--oneliner"), "SlurmdStartTime")


def test_the_agents_of_all_nodes_are_one_step(slurm: Slurm, script: Path):
    script.write_text(SUM)
    done = in_job(slurm, "-N3", line("--nproc-per-node", "1", script), COUNT).finish()
    assert done.returncode == 0, done.err
    assert len(sums(done.out)) == 3
    assert done.out.splitlines()[-1] == "1"


def test_a_lost_agent_costs_a_step_for_the_sweep_and_one_for_the_spare(slurm: Slurm, script: Path):
    script.write_text(WAIT)
    run = line("--nnodes", "2", "--nproc-per-node", "1", script)
    running = in_job(slurm, "-N3", f"{run} & launcher=$!; echo launcher $launcher; wait $launcher", COUNT)
    running.wait_for("runs . 2", 2)
    agent = next(pid for pid, line in slurm.leftovers()["node02"].items() if "DDPLAUNCH_START" in line)
    os.kill(agent, signal.SIGKILL)
    running.wait_for(r"\[node03:1\] runs 1 2 0")
    running.wait_for("srun: error: node02: task 1: Killed")
    [launcher] = running.wait_for(r"launcher (\d+)")
    os.kill(int(launcher[1]), signal.SIGTERM)  # A shell has its commands in the background ignore SIGINT.
    assert running.finish().out.splitlines()[-1] == "3"


@pytest.mark.slow
def test_so_are_those_of_many_nodes_which_slurm_reaches_by_way_of_others(tmp_path: Path):
    """They only say which runs there are: each that imports torch takes two seconds of this machine."""
    (tmp_path / "keys").mkdir()
    lab = nodes.Lab(tmp_path / "lab", nodes.Keys(tmp_path / "keys"), 16, "node{:02}")
    with lab, Slurm(lab, tree_width=3) as slurm:
        done = in_job(slurm, "-N16", line("--ps", "--hosts", "node[01-16]", "--start-timeout", "120"), COUNT).finish()
        assert done.returncode == 0, done.err
        assert done.out.splitlines()[-1] == "1"
        assert "cannot" not in done.err
        wait_until(lambda: not slurm.leftovers(), TIMEOUT_S, "agents are left", ASK_S)


def test_two_runs_at_once_in_one_job(slurm: Slurm, script: Path):
    script.write_text(SUM)
    run = line("--nproc-per-node", "1", script)
    done = in_job(slurm, "-N2", f"{run} & {run}; code=$?; wait $! && {COUNT} && exit $code").finish()
    assert done.returncode == 0, done.err
    assert [each.split()[:2] for _, each in sums(done.out)] == [["2", "0"], ["2", "0"], ["2", "1"], ["2", "1"]]
    assert done.out.splitlines()[-1] == "2"


def test_the_step_is_cancelled_and_all_agents_are_lost(slurm: Slurm):
    running = salloc(slurm, "-N3", *SLEEP)
    running.wait_for("begins", 3)
    [step] = [each for each in steps(slurm) if each.endswith(".0")]
    slurm.run("scancel", step)
    done = running.finish()
    assert done.returncode in (NODE_LOST, 128 + signal.SIGTERM), done.err
    assert not slurm.leftovers()


def test_a_launcher_that_is_killed_takes_the_step_with_it(slurm: Slurm, tmp_path: Path):
    go_on = f"until [ -e {tmp_path}/go ]; do sleep 0.1; done"
    running = in_job(slurm, "-N2", f"{line(*SLEEP)} & echo launcher $!; {go_on}")
    running.wait_for("begins", 2)
    [launcher] = running.wait_for(r"launcher (\d+)")
    os.kill(int(launcher[1]), signal.SIGKILL)
    wait_until(lambda: not slurm.leftovers() and not steps(slurm), TIMEOUT_S, "the step goes on", ASK_S)
    (tmp_path / "go").touch()
    running.finish()


def test_the_end_of_srun_is_that_of_the_step(slurm: Slurm):
    """A second process of srun sees to that."""
    running = salloc(slurm, "-N2", *SLEEP)
    running.wait_for("begins", 2)
    srun = next(pid for pid in children(launcher_pid(running)) if command_line(pid).startswith("srun "))
    os.kill(srun, signal.SIGKILL)
    assert running.finish().returncode == NODE_LOST
    assert not steps(slurm)


def test_ctrl_c_while_a_node_does_not_answer_ends_the_start(slurm: Slurm):
    running = salloc(slurm, "-N3", *SLEEP)
    slurm.lab["node02"].unplug()
    try:
        running.wait_for("starting on")
        began = time.monotonic()
        os.kill(launcher_pid(running), signal.SIGINT)
        done = running.finish()
        assert done.returncode == 128 + signal.SIGINT, done.err
        assert time.monotonic() - began < 10
    finally:
        slurm.lab["node02"].replug()
        wait_until(lambda: slurm.is_idle, TIMEOUT_S, "", ASK_S)


# Nodes on which no agent can start.


def test_only_the_node_is_named_on_which_no_agent_can_start(slurm: Slurm, script: Path, tmp_path: Path):
    script.write_text(SUM)
    (python := tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for name in ("node01", "node03"):  # Each node has a /run of its own.
        slurm.lab[name].run(["ln", "-sf", str(python), "/run/python"])
    options = ("--remote-python", "/run/python", "--nproc-per-node", "1", script)
    done = salloc(slurm, "-N3", *options).finish()
    assert done.returncode == NODE_NOT_READY
    assert re.search("^  node02: no /run/python$", done.err, re.MULTILINE), done.err
    done = salloc(slurm, "-N3", "--nnodes", "1:3", *options).finish()
    assert done.returncode == 0, done.err
    assert "node02 cannot be used: no /run/python; the job runs without it" in done.err
    assert [host for host, _ in sums(done.out)] == ["node01", "node03"]


def test_what_a_setup_prints_that_fails_is_said_of_its_node(slurm: Slurm, script: Path):
    script.write_text(SUM)
    setup = "[ $(hostname) != node02 ] || { echo no such module >&2; false; }"
    done = salloc(slurm, "-N3", "--remote-setup", setup, "--nproc-per-node", "1", script).finish()
    assert done.returncode == NODE_NOT_READY
    assert re.search("^  node02: --remote-setup ended with exit code 1: .*no such module$", done.err, re.MULTILINE)


def test_a_firewall_that_hides_the_launcher_is_named_with_what_to_set(slurm: Slurm):
    """The nodes have a route to that address, and what they send there vanishes."""
    slurm.lab.ip("addr add 10.97.0.1/32 dev lo")
    for node in slurm.lab.nodes:
        node.run(["ip", "neigh", "replace", "10.99.0.77", "lladdr", "02:00:00:02:00:00", "dev", "eth0"])
        node.run(["ip", "route", "replace", "10.97.0.1", "via", "10.99.0.77"])
    try:
        done = salloc(slurm, "-N2", "--local-addr", "10.97.0.1", "--start-timeout", "8", *SLEEP).finish()
    finally:
        for node in slurm.lab.nodes:
            node.run(["ip", "route", "del", "10.97.0.1"])
        slurm.lab.ip("addr del 10.97.0.1/32 dev lo")
    assert done.returncode == NODE_NOT_READY
    port = r"60\d\d\d"  # SrunPortRange of the cluster.
    told = rf"^  node\[01-02\]: it cannot connect to the launcher at 10.97.0.1:{port} \(timed out\)$"
    assert re.search(told, done.err, re.MULTILINE), done.err
    assert "--local-addr, --interface" in done.err


def test_what_srun_says_that_is_refused_is_the_reason(slurm: Slurm):
    env = {"SLURM_JOB_ID": "99999", "SLURM_JOB_NODELIST": "node[01-03]"}
    done = slurm.start(command(*SLEEP), env=env).finish()
    assert done.returncode == NODE_NOT_READY
    assert re.search(r"^  node\[01-03\]: srun did not start the agent: .*Invalid job id", done.err, re.MULTILINE)


@pytest.mark.slow
def test_a_node_whose_slurmd_is_dead_is_named_and_the_others_start(slurm: Slurm, script: Path):
    script.write_text(SUM)
    slurm.kill_all(slurm.lab["node02"])
    try:
        run = line("--nnodes", "1:3", "--nproc-per-node", "1", script)
        done = in_job(slurm, "-N3", run, COUNT).finish()
    finally:
        slurm.start_slurmd(slurm.lab["node02"])
        wait_until(lambda: slurm.is_idle, TIMEOUT_S, "", ASK_S)
    assert done.returncode == 0, done.err
    assert "node02 cannot be used: srun did not start the agent: Communication connection failure" in done.err
    assert [host for host, _ in sums(done.out)] == ["node01", "node03"]
    assert done.out.splitlines()[-1] == "2"


@pytest.mark.slow
def test_a_node_that_slurm_has_taken_out_of_the_job_is_named_and_the_others_start(slurm: Slurm, script: Path):
    script.write_text(SUM)
    down = "scontrol update NodeName=node02 State=DOWN Reason=test"
    try:
        run = line("--nnodes", "1:3", "--nproc-per-node", "1", script)
        done = in_job(slurm, "-N3 --no-kill", down, run).finish()
    finally:  # ReturnToService=2: it is used again when its slurmd has started.
        slurm.kill_all(slurm.lab["node02"])
        slurm.start_slurmd(slurm.lab["node02"])
        wait_until(lambda: slurm.is_idle, TIMEOUT_S, "", ASK_S)
    assert done.returncode == 0, done.err
    assert "node02 cannot be used: srun did not start the agent: SLURM has taken it out of the job" in done.err
    assert [host for host, _ in sums(done.out)] == ["node01", "node03"]


# The loss of a node.


@pytest.mark.slow
def test_a_node_that_crashes_and_is_back_at_once_ends_no_other_agent(slurm: Slurm, script: Path):
    """SLURM then finds that its step is gone, and asks srun, whose connection to the node is broken."""
    script.write_text(WAIT)
    node = slurm.lab["node02"]
    running = salloc(slurm, "-N3", "--nnodes", "1:3", "--nproc-per-node", "1", script)
    running.wait_for("runs . 3", 3)
    before = started(slurm, node.name)
    node.crash(silently=True)
    node.start()
    node.wait()
    node.replug()
    wait_until(lambda: time.strftime("%FT%T") > before)  # SLURM knows the start of a slurmd in whole seconds.
    slurm.start_slurmd(node)
    running.wait_for(r"\[node03:1\] runs 1 2 0")
    wait_until(lambda: started(slurm, node.name) != before, TIMEOUT_S, "its slurmd has not reported", ASK_S)
    os.kill(launcher_pid(running), signal.SIGINT)
    done = running.finish()
    assert done.returncode == 128 + signal.SIGINT
    assert "srun:" not in done.err
    wait_until(lambda: slurm.is_idle, TIMEOUT_S, "", ASK_S)
