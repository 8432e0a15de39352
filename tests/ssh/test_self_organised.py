"""Launchers started by hand on machines of a network, with none above them: in any order they become one job.

What one machine shows as well is in tests/process/test_nodes_meet.py.
"""

from __future__ import annotations

import re

import pytest

from tests.support.nodes import Lab
from tests.support.processes import wait_until
from tests.support.runs import PROGRAMS, Running, start

pytestmark = pytest.mark.ssh

ALLREDUCE, ROUNDS = PROGRAMS / "allreduce.py", PROGRAMS / "rounds.py"
RENDEZVOUS, NODE_LOST = 83, 84


def node(lab: Lab, name: str, *arguments: object, conf: str = "", endpoint: str = "node1:29400") -> Running:
    """One node's launcher, as typed there."""
    enter = ["nsenter", "--target", str(lab[name].init_pid), "--all"]
    options = ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    settings = ["--rdzv-conf", conf] if conf else []
    return start(*options, *settings, *map(str, arguments), under=enter, env={"OMP_NUM_THREADS": "1"})


def wait_for_world(nodes: list[Running], number: int) -> None:
    for each in nodes:
        each.wait_for(rf"rank \d of {len(nodes)} in round {number}")


@pytest.mark.slow
def test_nodes_may_come_before_the_one_that_serves_or_late_and_may_be_lost(make_lab, tmp_path):
    """torchrun: local_elastic_agent_test 15; rendezvous 12."""
    lab, end = make_lab(3), tmp_path / "end"
    arguments = ("--nnodes", "2:3", ROUNDS, end)
    conf = "last_call_timeout=1,keep_alive_interval=0.5"
    second = node(lab, "node2", *arguments, conf=conf)
    address = lab["node2"].address
    second.wait_for(
        rf"node2 \({address}\) has not found the rendezvous at node1:29400, which is not an address of this host: "
    )
    first = node(lab, "node1", *arguments, conf=conf)
    wait_for_world([first, second], 0)
    third = node(lab, "node3", *arguments, conf=conf)
    wait_for_world([first, second, third], 1)
    lab["node2"].crash(silently=True)
    wait_for_world([first, third], 2)
    end.touch()
    assert [each.finish().returncode for each in (first, third)] == [0, 0]
    second.finish()


def test_an_endpoint_that_no_node_has_is_an_error_on_each_that_names_its_addresses(make_lab):
    lab = make_lab(2)
    names = ("node1", "node2")
    options = {"endpoint": "lab:29400", "conf": "read_timeout=2"}
    for name, each in [(name, node(lab, name, "--nnodes", "2", ROUNDS, "end", **options)) for name in names]:
        done = each.finish()
        assert done.returncode == RENDEZVOUS
        where = (
            rf"{name} \({lab[name].address}\) cannot join the other nodes at lab:29400, "
            "which is not an address of this host"
        )
        assert re.search(rf"error: {where}: nothing answers there \(connection refused\), after 2 s\n", done.err)
        assert "read_timeout=SECONDS waits longer" in done.err


def test_a_node_that_cannot_resolve_the_endpoints_name_says_so_at_once_and_may_come_again(make_lab, tmp_path):
    lab = make_lab(2)
    hosts = lab["node2"].folder / "hosts"
    known = hosts.read_text()
    hosts.write_text(known.replace("node1\n", "other\n"))
    (end := tmp_path / "end").touch()
    arguments = ("--nnodes", "2", ROUNDS, end)
    first = node(lab, "node1", *arguments)
    done = node(lab, "node2", *arguments).finish()
    assert done.returncode == RENDEZVOUS
    assert re.search(r"error: node2 cannot reach node1:29400: .* in name resolution|not known", done.err)
    assert "/etc/hosts" in done.err
    first.wait_for("waiting at node1:29400 for 1 more node")
    hosts.write_text(known)
    assert [each.finish().returncode for each in (node(lab, "node2", *arguments), first)] == [0, 0]


@pytest.mark.torch
@pytest.mark.slow
def test_the_loss_of_the_node_that_serves_ends_the_job_on_all_others_with_that_cause(make_lab):
    lab = make_lab(3)
    names = ("node1", "node2", "node3")
    nodes = [node(lab, name, "--nnodes", "2:3", ROUNDS, "end", conf="keep_alive_interval=0.5") for name in names]
    wait_for_world(nodes, 0)
    lab["node1"].crash(silently=True)
    for each in nodes[1:]:
        done = each.finish()
        assert done.returncode == NODE_LOST, done.err
        assert re.search(r"the job failed =+\nthe rendezvous at node1:29400 is lost: ", done.err), (
            "of each: rank 0 is lost"
        )
    nodes[0].finish()
    wait_until(lambda: not lab.leftovers())


@pytest.mark.torch
@pytest.mark.slow
def test_the_loss_of_another_node_ends_a_job_of_fixed_size_and_its_victims_did_not_fail_first(make_lab):
    lab = make_lab(2)
    nodes = [
        node(lab, name, "--nnodes", "2", ROUNDS, "end", conf="keep_alive_interval=0.5") for name in ("node1", "node2")
    ]
    wait_for_world(nodes, 0)
    lab["node2"].crash()  # The connections of its rank close at once.
    done = nodes[0].finish()
    assert done.returncode == NODE_LOST, done.err
    assert done.report["first_failure"] is None
    assert re.search(r"node2 \(node \d\) is lost", done.err)
    assert "no further attempt: 1 node is left, and 2 are needed" in done.err
    nodes[1].finish()
    wait_until(lambda: not lab.leftovers())
