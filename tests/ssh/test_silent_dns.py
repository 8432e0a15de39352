"""Nodes whose addresses have no names, and whose name server never answers: torch asks it at every start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.ssh_jobs import job

pytestmark = [pytest.mark.ssh, pytest.mark.torch]

LOOKUP_S = 10.0

CONNECT = """
import os, time, torch.distributed as dist
began = time.monotonic()
dist.init_process_group("gloo")
print("connected after", time.monotonic() - began, os.environ["RES_OPTIONS"])
dist.barrier()
dist.destroy_process_group()
"""


def test_the_job_starts_and_the_line_for_the_hosts_file_is_shown_once(make_lab, tmp_path: Path):
    lab = make_lab(2)
    for node in lab.nodes:
        node.silence_dns()
    lab["node2"].run(["ip", "address", "add", "fd00:99::2/64", "dev", "eth0", "nodad"])
    script = tmp_path / "connect.py"
    script.write_text(CONNECT)
    finished = job(lab, "-v", "--nproc-per-node", "2", script).finish()
    assert finished.returncode == 0, finished.err
    seconds = re.findall(r"connected after (\S+) timeout:1 attempts:1", finished.out)
    assert len(seconds) == 4
    assert max(map(float, seconds)) < LOOKUP_S / 2
    assert finished.err.count(f"add the line `::ffff:{lab['node1'].address} node1` to /etc/hosts") == 1
    assert "lost" not in finished.err
    # Written after 5 s: the store of the rendezvous waits for no name server either.
    assert "searches for the rendezvous" not in finished.err
