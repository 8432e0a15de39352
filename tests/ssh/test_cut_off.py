"""A node that is lost in part only, or has a network that leads nowhere: the job goes on without, or ends clean."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.nodes import LAB_ADDRESS, Lab
from tests.support.processes import parent, wait_until
from tests.support.ssh_jobs import agent, rounds, wait_for_world

pytestmark = pytest.mark.ssh

NOBODYS_MAC = "02:00:00:ff:00:01"


@pytest.mark.slow
def test_nodes_that_hear_the_launcher_but_do_not_answer_or_the_reverse_are_left_behind(make_lab, tmp_path):
    lab = make_lab(4)
    options = ("--nnodes", "2:4", "--shutdown-timeout", "1", "--connect-timeout", "3")
    running = rounds(lab, tmp_path / "end", *options)
    wait_for_world(running, 0, "node1,node2,node3,node4")
    lab.ip(f"neigh replace {lab['node2'].address} lladdr {NOBODYS_MAC} dev br0 nud permanent")
    lab["node4"].run(["ip", *f"neigh replace {LAB_ADDRESS} lladdr {NOBODYS_MAC} dev eth0 nud permanent".split()])
    for name in ("node2", "node4"):
        # The one that hears nothing may have ended by itself, and be seen to have, before it has been silent for 5 s.
        running.wait_for(f"{name} (has not answered for 5 s|ended with exit code 0|has ended); the job can go on")
        wait_until(lambda name=name: not lab[name].pids(), 30, f"{name} goes on")
    running.wait_for(r"\[node1:0\] rank 0 of 2 in round")
    (tmp_path / "end").touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err
    assert "left: unknown on node[2,4]" in finished.err


@pytest.mark.slow
def test_a_node_that_the_launcher_reaches_and_the_node_that_serves_does_not_is_left_out(make_lab, tmp_path):
    lab = make_lab(3)
    options = ("--nnodes", "2:3", "--shutdown-timeout", "1", "--rdzv-conf", "join_timeout=12")
    running = rounds(lab, tmp_path / "end", *options)
    wait_for_world(running, 0, "node1,node2,node3")
    for name, other in (("node1", "node3"), ("node3", "node1")):
        lab[name].run(
            ["ip", *f"neigh replace {lab[other].address} lladdr {NOBODYS_MAC} dev eth0 nud permanent".split()]
        )
    running.wait_for("node3 cannot join the others .*; the job can go on without it", 1, 60)
    running.wait_for(r"\[node1:0\] rank 0 of 2 in round")
    (tmp_path / "end").touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err


def test_a_node_whose_sshd_is_killed_is_left_behind_and_ends_its_workers(make_lab, tmp_path):
    lab = make_lab(3)
    running = rounds(lab, tmp_path / "end", "--nnodes", "2:3", "--shutdown-timeout", "1")
    wait_for_world(running, 0, "node1,node2,node3")
    os.kill(parent(agent(lab, "node2")), signal.SIGKILL)
    running.wait_for("the connection to node2 has ended; the job can go on without it")
    wait_until(lambda: not lab["node2"].pids(), 15, "node2 goes on")
    running.wait_for(r"\[node3:1\] rank 1 of 2 in round")
    (tmp_path / "end").touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err


def test_a_spare_takes_the_rank_of_the_node_that_served_the_rendezvous_and_the_others_keep_theirs(make_lab, tmp_path):
    """torchrun: rendezvous 15."""
    lab = make_lab(3)
    running = rounds(lab, tmp_path / "end", "--nnodes", "2")
    wait_for_world(running, 0, "node1,node2")
    lab["node1"].crash()
    running.wait_for("node3 replaces node1")
    wait_for_world(running, 1, "node3,node2")
    (tmp_path / "end").touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err


def add_second_network(lab: Lab) -> None:
    """Nodes reach the launcher by eth0 and each other by eth1 only: packets between them on eth0 vanish."""
    lab.ip("link add br1 type bridge", "link set br1 up")
    for number, node in enumerate(lab.nodes, 1):
        lab.ip(
            f"link set {node.link} type bridge_slave isolated on",
            f"link add w{number} type veth peer name eth1 netns {node.netns}",
            f"link set w{number} master br1 up",
        )
        node.run(["ip", "addr", "add", f"10.98.0.{number}/24", "dev", "eth1"])
        node.run(["ip", "link", "set", "eth1", "up"])


@pytest.mark.torch
def test_nodes_whose_first_network_is_a_dead_end_meet_by_the_second(make_lab, tmp_path):
    lab = make_lab(2)
    add_second_network(lab)
    running = rounds(lab, tmp_path / "end", "--max-restarts", "1")
    wait_for_world(running, 0, "node1,node2")
    worker = next(pid for pid, line in lab["node2"].pids().items() if "rounds.py" in line and "-c" not in line)
    os.kill(worker, signal.SIGKILL)
    wait_for_world(running, 1, "node1,node2")
    (tmp_path / "end").touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err
