"""--check-first over SSH: spares replace hosts that do not pass, and the list of those that do can be used again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddplaunch.cluster.hostfile import read_hostfile
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh

NODE_NOT_READY = 82
NAMES = ("--nproc-per-node", "1", "--no-python", "hostname")


def few_files_on(*hosts: str) -> tuple[str, str]:
    """Options by which the login of these hosts has a low limit."""
    return "--remote-setup", f"case $(hostname) in {'|'.join(hosts)}) ulimit -n 2000;; esac"


def said(out: str) -> list[str]:
    return sorted(line.split()[-1] for line in out.splitlines())


def test_spares_replace_hosts_that_do_not_pass_and_the_list_is_a_hostfile(make_lab, tmp_path: Path):
    lab, good = make_lab(3), tmp_path / "good"
    options = ("--nnodes", "2", "--check-first", "quick", "--passing-hosts-file", good, *few_files_on("node2"))
    done = job(lab, *options, *NAMES, hosts="node1:slots=1,node[2-3]").finish()
    assert done.returncode == 0, done.err
    assert said(done.out) == ["node1", "node3"]
    assert "not used: node2: at most 2000 open files, too few for many workers" in done.err
    assert "all 2 nodes pass the check" in done.err
    assert good.read_text() == "node1 slots=1\nnode3\n"
    assert [str(host) for host in read_hostfile(str(good))] == ["node1", "node3"]


@pytest.mark.parametrize(("nodes", "starts"), [("1:2", True), ("2", False)])
def test_without_a_spare_a_run_needs_enough_that_pass(nodes: str, starts: bool, make_lab, tmp_path: Path):
    lab, good = make_lab(2), tmp_path / "good"
    options = ("--nnodes", nodes, "--check-first", "quick", "--passing-hosts-file", good, *few_files_on("node1"))
    done = job(lab, *options, *NAMES).finish()
    assert done.returncode == (0 if starts else NODE_NOT_READY), done.err
    assert said(done.out) == ["node2"] * starts
    text = "error: the check was not passed; 2 nodes are needed, and 1 can be used\n  node1: at most 2000 open files"
    assert (text in done.err) is not starts
    assert ("node2 passes the check" in done.err) is starts
    assert good.read_text() == "node2\n"


@pytest.mark.slow
@pytest.mark.torch
def test_hosts_are_measured_and_one_that_cannot_reach_others_or_is_down_is_not_used(make_lab, tmp_path: Path):
    lab, good = make_lab(4), tmp_path / "good"
    lab["node1"].crash()
    lab["node2"].run(["ip", "route", "add", "blackhole", f"{lab['node3'].address}/32"])
    options = ("--nnodes", "2", "--check-first", "deep", "--passing-hosts-file", good)
    done = job(lab, *options, *NAMES).finish()
    assert done.returncode == 0, done.err
    assert said(done.out) == ["node2", "node4"]
    assert "not used: node1: " in done.err
    assert "not used: node3: node2 cannot connect to node3: " in done.err
    assert "2 hosts pass the check; all-reduce by gloo over 2 nodes: " in done.err
    assert good.read_text() == "node2\nnode4\n"
    refused = job(lab, "--nnodes", "3", *options[2:], *NAMES).finish()
    assert (refused.returncode, refused.out) == (NODE_NOT_READY, ""), refused.err
    assert "error: the check was not passed; 3 nodes are needed, and 2 can be used\n" in refused.err
    assert not lab.leftovers()
