"""--stacks over SSH, where each of two machines has its own launcher: each knows its node, one knows all."""

from __future__ import annotations

import os
import re

import pytest

from tests.support.nodes import Lab
from tests.support.runs import PROGRAMS, Finished, Running, start

pytestmark = pytest.mark.ssh


def node(lab: Lab, name: str, run_id: str) -> Running:
    """One node's launcher, as typed there."""
    enter = ["nsenter", "--target", str(lab[name].init_pid), "--all"]
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29400", "--rdzv-id", run_id]
    return start(*meeting, "--nproc-per-node", "1", PROGRAMS / "hang.py", "*=loop", under=enter)


def from_elsewhere(lab: Lab, option: str, run_id: str, hosts: str) -> Finished:
    """The command on the lab's machine for launchers."""
    given = ("--hosts", hosts, "--ssh-config", lab.ssh_config, "-x", "DDPLAUNCH_TEST_MARK")
    finished = start(option, run_id, *given, under=lab.prefix).finish()
    assert finished.returncode == 0, finished.err
    return finished


@pytest.mark.slow
def test_the_launcher_that_is_asked_answers_for_its_node_or_for_all(make_lab):
    lab, run_id = make_lab(2), f"stacks-{os.getpid()}"
    nodes = [node(lab, name, run_id) for name in ("node1", "node2")]
    for each in nodes:
        each.wait_for("ready")
    finished = from_elsewhere(lab, "--stacks", run_id, "node2")
    assert len(re.findall(r"^rank \d: still, at hang.py:\d+ in loop$", finished.out, re.MULTILINE)) == 1
    assert "only node2; for all nodes, add --hosts with the node that serves node1:29400\n" in finished.out
    finished = from_elsewhere(lab, "--stacks", run_id, "node[1-2]")
    assert re.search(r"^ranks 0-1: still, at hang.py:\d+ in loop$", finished.out, re.MULTILINE)
    assert re.search(r"^all stacks: node1:/.*/stacks.txt$", finished.out, re.MULTILINE)
    assert "only node" not in finished.out
    from_elsewhere(lab, "--kill", run_id, "node[1-2]")
    for each in nodes:
        each.finish()
