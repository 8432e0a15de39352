"""The stores serve thousands of clients: by libuv, and beyond the user's soft limit of open files."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.runs import PROGRAMS, environment, run

pytestmark = pytest.mark.torch


def test_a_store_has_more_clients_than_the_soft_limit_of_open_files():
    command = [sys.executable, str(PROGRAMS / "many_clients.py"), "48"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.stdout == "1 2\n", done.stderr[-2000:]


def test_both_stores_use_libuv_on_the_ports_that_they_are_handed():
    """Without it, each client takes a thread's turn of one loop: 96,000 clients 30 minutes in place of 100 s."""
    finished = run("--dry-run", "--nnodes", "2", "--nproc-per-node", "1", PROGRAMS / "store_threads.py")
    assert finished.returncode == 0, finished.err
    found = sorted(line.partition("] ")[2] for line in finished.out.splitlines())
    assert found == ["store pt_tcpstore_uv"] * 2  # That of the rendezvous, and the workers'.
