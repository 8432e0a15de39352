"""Many nodes behind one jump host are one job; two jobs on the same nodes are two."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.nodes import NodeOptions
from tests.support.ssh_jobs import job, rounds, wait_for_world

pytestmark = pytest.mark.ssh

NODE_LOST = 84


def test_16_hosts_behind_a_jump_host_that_lets_in_few_at_a_time_are_asked_while_a_job_runs(make_lab, tmp_path: Path):
    ports = range(2200, 2204)
    lab = make_lab(5, node1=NodeOptions(max_startups="10:30:100"), default=NodeOptions(ports=ports))
    targets = [
        lab.config_of(node, f"target{n}x{port}", port) + "  ProxyJump node1\n"
        for n, node in enumerate(lab.nodes[1:])
        for port in ports
    ]
    lab.ssh_config.write_text(lab.config_of(lab["node1"]) + "".join(targets))
    names = [text.split()[1] for text in targets]
    running = rounds(lab, tmp_path / "end", "--rdzv-id", "behind", hosts=",".join(names[::8]))
    wait_for_world(running, 0, ",".join(names[::8]))
    seen = job(lab, "--ps", hosts=",".join(names)).finish()
    assert seen.returncode == 0, seen.err
    assert re.search(
        r"^behind +running \S+ +\S+rounds\.py +lab,target\[0,2\]x2200 +1 launcher, 2 agents, ", seen.out, re.MULTILINE
    )
    (tmp_path / "end").touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err
    assert lab["node1"].log.count("Accepted publickey") == 2, "one for each launcher"


def test_a_job_is_not_touched_by_another_of_the_same_name_on_the_same_nodes(make_lab, tmp_path: Path):
    lab = make_lab(2)
    ends = (tmp_path / "first", tmp_path / "second")
    first, second = (rounds(lab, end, "--rdzv-id", "twin") for end in ends)
    for running in (first, second):
        wait_for_world(running, 0, "node1,node2")
    victim = next(pid for pid, line in lab["node2"].pids().items() if str(ends[0]) in line and "rounds.py" in line)
    os.kill(victim, signal.SIGKILL)
    lost = first.finish()
    assert lost.returncode == 128 + signal.SIGKILL, lost.err
    assert "\nrank 1 on " in lost.err
    ends[1].touch()
    kept = second.finish()
    assert kept.returncode == 0, kept.err
    assert [attempt["outcome"] for attempt in kept.report["attempts"]] == ["succeeded"]
