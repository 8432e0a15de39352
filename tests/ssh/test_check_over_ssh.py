"""--check over SSH: all nodes in one table, a real job between them, and what stands in its way."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.nodes import Lab
from tests.support.runs import Finished, start

pytestmark = pytest.mark.ssh

NODE_NOT_READY, RENDEZVOUS = 82, 83


def check(lab: Lab, hosts: str, *arguments: str | Path) -> Finished:
    env = {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    given = ("--check", "--hosts", hosts, "--ssh-config", lab.ssh_config, "-x", "DDPLAUNCH_TEST_MARK")
    return start(*given, *arguments, under=lab.prefix, env=env).finish()


def rows(finished: Finished) -> list[str]:
    """The first cell of each line of the table, below its head."""
    return [re.split(r"\s{2,}", line)[0] for line in finished.out.splitlines()[1:] if "  " in line]


@pytest.mark.slow
@pytest.mark.torch
def test_the_rest_is_checked_where_a_host_cannot_be_used(make_lab):
    lab = make_lab(3)
    lab["node2"].crash()
    finished = check(lab, "node[1-3]")
    assert finished.returncode == NODE_NOT_READY
    assert "some hosts cannot be used\n  node2: " in finished.err
    assert rows(finished) == ["node[1,3]"]
    assert re.search(r"^all-reduce by gloo over 2 nodes: [0-9.e+]+ [MG]bit/s", finished.out, re.MULTILINE)
    assert not lab.leftovers()


def test_a_script_that_is_named_must_be_there(make_lab, tmp_path):
    lab = make_lab(1)
    finished = check(lab, "node1", tmp_path / "none.py")
    assert finished.returncode == NODE_NOT_READY
    assert "none.py" in finished.err
    assert not finished.out


def test_nodes_that_cannot_reach_each_other_are_told_and_there_is_no_job(make_lab):
    lab = make_lab(3)
    # Both still answer the launcher's machine, and the first node.
    for one, other in (("node2", "node3"), ("node3", "node2")):
        lab[one].run(["ip", "route", "add", "blackhole", f"{lab[other].address}/32"])
    finished = check(lab, "node[1-3]")
    assert finished.returncode == RENDEZVOUS, finished.err
    assert "error: nodes cannot connect to each other" in finished.err
    assert f"node2 cannot connect to node3 ({lab['node3'].address}): " in finished.err
    assert f"node3 cannot connect to node2 ({lab['node2'].address}): " in finished.err
    assert "all-reduce" not in finished.out
    assert rows(finished) == ["node[1-3]"]


@pytest.mark.slow
@pytest.mark.torch
def test_where_workers_cannot_meet_that_is_told_and_all_that_was_found(make_lab, tmp_path):
    lab = make_lab(2)
    slow_dns = tmp_path / "resolv.conf"
    slow_dns.write_text("nameserver 10.99.0.77\noptions timeout:1 attempts:1\n")  # Nobody has that address.
    lab["node2"].run(["mount", "--bind", str(slow_dns), "/etc/resolv.conf"])
    finished = check(lab, "node[1-2]", "-x", "GLOO_SOCKET_IFNAME=none0")
    assert finished.returncode == RENDEZVOUS, finished.err
    assert "error: the test job failed, although the agents can connect" in finished.err
    assert rows(finished)[:2] == ["node1", "node2"]
    assert f"add the line `::ffff:{lab['node2'].address} node2` to /etc/hosts there" in finished.out
