"""One command starts all nodes over SSH; they run one gloo job, and one outcome comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.support.nodes import Lab, Node, NodeOptions
from tests.support.processes import wait_until
from tests.support.runs import PROGRAMS, Finished
from tests.support.ssh_jobs import agent, frozen, job, rounds, wait_for_world

pytestmark = pytest.mark.ssh

ALLREDUCE, ASK, EXIT_WITH = PROGRAMS / "allreduce.py", PROGRAMS / "ask.py", PROGRAMS / "exit_with.py"
NODE_NOT_READY, RENDEZVOUS, NODE_LOST, GAVE_UP = 82, 83, 84, 93


def exits(finished: Finished, attempt: int = -1) -> list[tuple[int, str, int]]:
    """Rank, host and returncode of all workers of an attempt."""
    return [
        (exit_["rank"], exit_["host"], exit_["returncode"]) for exit_ in finished.report["attempts"][attempt]["exits"]
    ]


@pytest.mark.torch
def test_two_nodes_of_other_slots_run_one_gloo_job_and_recover_from_a_killed_rank(make_lab):
    """Also where neither can resolve its own name."""
    lab = make_lab(2, node1=NodeOptions(resolves=False), node2=NodeOptions(resolves=False))
    hosts = "node1:slots=1,node2:slots=3"
    finished = job(lab, "--max-restarts", "1", ALLREDUCE, "40", "3:9", hosts=hosts).finish()
    assert finished.returncode == 0, finished.err
    assert exits(finished) == [(0, "node1", 0), (1, "node2", 0), (2, "node2", 0), (3, "node2", 0)]
    assert [(host["host"], host["workers"]) for host in finished.report["hosts"]] == [("node1", 1), ("node2", 3)]
    assert all(host["cpus"] for host in finished.report["hosts"])
    assert "rank 3 on node2 failed: SIGKILL" in finished.err, finished.err
    assert len(re.findall(r"^\[node[12]:[0-3]\] .*sum 10 in attempt 1", finished.out, re.MULTILINE)) == 4


def test_workers_get_the_interface_by_which_nodes_reach_each_other_and_what_is_forwarded(make_lab):
    lab = make_lab(2)
    code = "import os, json; print('ENV', json.dumps(dict(os.environ)))"
    finished = job(
        lab, "--no-python", "-x", "COLOUR=blue", sys.executable, "-c", code, extra={"NCCL_DEBUG": "INFO"}
    ).finish()
    assert finished.returncode == 0, finished.err
    for environ in [json.loads(line.split("ENV ")[1]) for line in finished.out.splitlines() if "ENV " in line]:
        assert (environ["GLOO_SOCKET_IFNAME"], environ["MASTER_ADDR"]) == ("eth0", lab["node1"].address)
        assert (environ["NCCL_DEBUG"], environ["COLOUR"]) == ("INFO", "blue")
        assert "NCCL_SOCKET_IFNAME" not in environ


def add_bridge(node: Node) -> None:
    """A bridge of that machine alone."""
    for words in (
        "link add virbr0 type bridge",
        "link add vnet0 type veth peer name vnet1",
        "link set vnet0 addrgenmode none",
        "link set vnet1 addrgenmode none",
        "link set vnet1 up",
        "link set vnet0 master virbr0 up",
        "link set virbr0 up",
        "addr add 192.168.122.1/24 dev virbr0",
    ):
        node.run(["ip", *words.split()])


@pytest.mark.torch
def test_gloo_meets_where_the_names_of_the_hosts_are_those_of_a_bridge_that_leads_nowhere(make_lab, tmp_path):
    """By itself, gloo listens at the address of the host's name, which is the same on both."""
    lab = make_lab(2)
    for node in lab.nodes:
        add_bridge(node)
        hosts = tmp_path / node.name
        hosts.write_text(f"127.0.0.1 localhost\n::1 localhost\n192.168.122.1 {node.name}\n")
        node.run(["mount", "--bind", str(hosts), "/etc/hosts"])
    finished = job(lab, "--nproc-per-node", "1", ALLREDUCE, "1").finish()
    assert finished.returncode == 0, finished.err
    assert finished.out.count("sum 3 in attempt 0") == 2, finished.out


def test_a_plan_names_the_interfaces_that_nccl_will_use(make_lab):
    [node] = make_lab(1).nodes
    add_bridge(node)
    options = ("--plan", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{node.address}:29400")
    command_line = [sys.executable, "-m", "ddplaunch", *options, "train.py"]
    shown = node.run(["env", "CUDA_VISIBLE_DEVICES=0", *command_line]).stdout
    assert "NCCL_SOCKET_IFNAME==eth0" in shown
    assert "NCCL_SOCKET_IFNAME" not in node.run(["env", "CUDA_VISIBLE_DEVICES=", *command_line]).stdout


def test_nccl_is_kept_off_a_bridge_that_leads_to_no_other_node(make_lab):
    """Both nodes have one of that name and address, as libvirt makes; a setting of the user stays."""
    lab = make_lab(2)
    for node in lab.nodes:
        add_bridge(node)
    code = "import os; print('NCCL', os.environ.get('NCCL_SOCKET_IFNAME'), os.environ['GLOO_SOCKET_IFNAME'])"
    program = ("-x", "CUDA_VISIBLE_DEVICES=0", "--no-python", sys.executable, "-c", code)
    finished = job(lab, *program).finish()
    assert finished.returncode == 0, finished.err
    assert sorted(line.split("NCCL ")[1] for line in finished.out.splitlines()) == ["=eth0 eth0"] * 2
    said = "NCCL would also use virbr0, which does not lead to other nodes: NCCL_SOCKET_IFNAME==eth0"
    assert all(f"{name}: {said}" in finished.err for name in ("node1", "node2")), finished.err
    finished = job(lab, "-x", "NCCL_SOCKET_IFNAME=virbr0", *program).finish()
    assert finished.out.count("NCCL virbr0 eth0") == 2
    assert "NCCL would" not in finished.err


def test_a_named_interface_is_the_one_that_workers_use(make_lab):
    lab = make_lab(2)
    code = "import os; print('ENV', os.environ['NCCL_SOCKET_IFNAME'], os.environ['MASTER_ADDR'])"
    finished = job(lab, "--no-python", "--interface", "eth0", sys.executable, "-c", code).finish()
    assert finished.returncode == 0, finished.err
    assert finished.out.count(f"ENV =eth0 {lab['node1'].address}") == 2
    missing = job(lab, "--no-python", "--interface", "eth7", sys.executable, "-c", code).finish()
    assert missing.returncode == RENDEZVOUS
    assert re.search(r"error: --interface eth7: node\d has no address on it", missing.err)


def test_a_node_that_fails_by_itself_is_left_out_of_an_elastic_run(make_lab):
    lab = make_lab(3)
    lab.nodes[1].run(["sh", "-c", "ip link set eth0 down && ip link set eth0 name eth7 && ip link set eth7 up"])
    code = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    program = ("--no-python", "--interface", "eth0", sys.executable, "-c", code)
    finished = job(lab, "--nnodes", "2:3", *program, hosts="node1,node2,node3").finish()
    assert finished.returncode == 0, finished.err
    assert "node2 cannot be used: --interface eth0: node2 has no address on it; the job runs without it" in finished.err
    assert set(finished.out.splitlines()) == {"[node1:0] rank 0 of 2", "[node3:1] rank 1 of 2"}


def test_a_script_on_another_machine_gives_up(make_lab):
    lab = make_lab(2)
    arguments = ("--nproc-per-node", "1", "--max-restarts", "2", ASK, "give_up", "the loss is nan")
    finished = job(lab, *arguments).finish()
    assert finished.returncode == GAVE_UP, finished.err
    assert "\nrank 1 on node2 gave up: the loss is nan\n" in finished.err
    assert "\nnot restarted: rank 1 on node2 gave up: the loss is nan\n" in finished.err


def test_all_hosts_that_cannot_be_used_are_told_together_and_nothing_is_started(make_lab):
    lab = make_lab(3)
    lab["node2"].crash()
    finished = job(lab, EXIT_WITH, hosts="node[1-3],node4").finish()
    assert finished.returncode == NODE_NOT_READY
    assert "not enough hosts can be used" in finished.err
    assert "node2" in finished.err
    assert "node4" in finished.err


def test_a_spare_takes_the_place_of_a_host_that_cannot_be_used(make_lab, tmp_path):
    lab = make_lab(3)
    lab["node1"].crash()
    running = rounds(lab, tmp_path / "end", "--nnodes", "2")
    wait_for_world(running, 0, "node3,node2")
    (tmp_path / "end").touch()
    finished = running.finish()
    assert finished.returncode == 0
    assert "node1 cannot be used: " in finished.err


def test_a_node_that_dies_is_left_behind_also_if_it_serves_the_rendezvous(make_lab, tmp_path):
    lab = make_lab(3)
    running = rounds(lab, tmp_path / "end", "--nnodes", "2:3")
    wait_for_world(running, 0, "node1,node2,node3")
    lab["node1"].crash()
    wait_for_world(running, 1, "node2,node3")
    (tmp_path / "end").touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err


@pytest.mark.slow
def test_a_node_that_is_cut_off_is_left_behind_and_ends_its_workers_itself(make_lab, tmp_path):
    lab = make_lab(3)
    running = rounds(lab, tmp_path / "end", "--nnodes", "2:3", "--shutdown-timeout", "1")
    wait_for_world(running, 0, "node1,node2,node3")
    lab["node1"].unplug()
    running.wait_for("node1 has not answered for 5 s; the job can go on without it")
    wait_for_world(running, 1, "node2,node3")
    wait_until(lambda: not lab["node1"].pids(), 15, "the node that is cut off goes on")
    lab["node1"].replug()
    (tmp_path / "end").touch()
    assert running.finish().returncode == 0


def test_a_short_cut_is_survived(make_lab, tmp_path):
    lab = make_lab(2)
    running = rounds(lab, tmp_path / "end")
    wait_for_world(running, 0, "node1,node2")
    lab["node2"].unplug()
    with pytest.raises(TimeoutError):
        running.wait_for("node2 has not answered|is lost|goes on", 1, 3)
    lab["node2"].replug()
    (tmp_path / "end").touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err
    assert len(finished.report["attempts"]) == 1


@pytest.mark.slow
def test_an_agent_that_is_frozen_is_lost_and_its_node_swept(make_lab, tmp_path):
    lab = make_lab(2)
    running = rounds(lab, tmp_path / "end")
    wait_for_world(running, 0, "node1,node2")
    os.kill(agent(lab, "node2"), signal.SIGSTOP)
    finished = running.finish()
    assert finished.returncode == NODE_LOST
    assert "\nnode2 has not answered for 5 s; no further attempt: 1 node is left, and 2 are needed\n" in finished.err
    assert "\nhint:     With one more host as a spare, or with --nnodes MIN:MAX, " in finished.err
    assert not lab.leftovers()


def test_a_killed_agent_is_told_of_and_its_node_swept(make_lab, tmp_path):
    lab = make_lab(2)
    running = rounds(lab, tmp_path / "end")
    wait_for_world(running, 0, "node1,node2")
    os.kill(agent(lab, "node2"), signal.SIGKILL)
    finished = running.finish()
    assert finished.returncode == NODE_LOST
    assert "\nthe connection to node2 has ended; no further attempt: 1 node is left, and 2 are needed\n" in finished.err
    assert "\nleft:     nothing" in finished.err


def test_a_killed_launcher_leaves_nothing_on_any_node(make_lab, tmp_path):
    lab = make_lab(2)
    running = rounds(lab, tmp_path / "end", "--shutdown-timeout", "1")
    wait_for_world(running, 0, "node1,node2")
    running.signal(signal.SIGKILL)
    running.finish()
    wait_until(lambda: not lab.leftovers(), 15)


@contextlib.contextmanager
def stopped_sshd(lab: Lab, name: str) -> Iterator[None]:
    """All sshd of a node are stopped meanwhile: the kernel accepts connections, and nobody answers."""
    with contextlib.ExitStack() as stack:
        for pid in lab[name].sshd_pids():
            stack.enter_context(frozen(pid))
        yield


@contextlib.contextmanager
def unplugged(lab: Lab, name: str) -> Iterator[None]:
    lab[name].unplug()
    yield
    lab[name].replug()


@pytest.mark.parametrize("silent", [unplugged, stopped_sshd])
def test_ctrl_c_works_while_hosts_are_connected_to(make_lab, tmp_path, silent):
    lab = make_lab(2)
    with silent(lab, "node2"):
        running = rounds(lab, tmp_path / "end")
        agent(lab, "node1")
        running.signal(signal.SIGINT)
        assert running.finish(20).returncode == 130
