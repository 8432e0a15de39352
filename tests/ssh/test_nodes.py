"""The virtual machines of these tests behave like machines on a network, and vanish without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.nodes import NodeOptions, remove_stale
from tests.support.processes import wait_until
from tests.support.runs import ROOT, environment

pytestmark = pytest.mark.ssh


def _ssh(lab, name, command, **options):
    return lab.run(["ssh", "-F", lab.ssh_config, "-o", "ConnectTimeout=20", name, command], **options)


def test_each_is_a_machine_of_its_own(make_lab):
    own = subprocess.run(["ip", "-brief", "address"], capture_output=True, text=True, check=True).stdout
    lab = make_lab(2, node2=NodeOptions(resolves=False))
    assert _ssh(lab, "node2", "hostname; ps ax").stdout.splitlines()[0] == "node2"
    assert "node1" not in _ssh(lab, "node2", "ps ax").stdout
    assert lab["node1"].run(["getent", "hosts", "node1", "node2"]).stdout.count("10.99.1.") == 2
    assert _ssh(lab, "node2", "getent hosts node2").returncode == 2
    assert _ssh(lab, "node2", "getent hosts node1").returncode == 0
    assert subprocess.run(["ip", "-brief", "address"], capture_output=True, text=True, check=True).stdout == own
    assert lab.run(["hostname"]).stdout == "lab\n"


def test_a_crash_takes_all_and_a_node_can_boot_again(make_lab):
    lab = make_lab(1)
    node = lab["node1"]
    with lab.popen(["ssh", "-F", lab.ssh_config, "node1", "setsid -w sleep 1000"]) as ssh:
        wait_until(lambda: "sleep 1000" in node.pids().values())
        node.crash()
        assert ssh.wait(20) == 255
    assert node.pids() == {}
    node.start()
    node.wait()
    assert _ssh(lab, "node1", "true").returncode == 0


def test_a_slow_link_is_slow_both_ways_and_whole(make_lab):
    lab = make_lab(1)
    node = lab["node1"]
    assert lab.run(["python3", "-c", PING, node.address]).returncode == 0
    node.slow_down(0.1, 2e6)
    took_s = float(lab.run(["python3", "-c", PING, node.address]).stdout)
    assert 0.2 <= took_s < 1.0
    started_s = time.monotonic()
    assert len(_ssh(lab, "node1", "head -c 250000 /dev/zero").stdout) == 250_000
    assert time.monotonic() - started_s > 1.0
    node.unplug()
    node.replug()
    node.full_speed()
    assert float(lab.run(["python3", "-c", PING, node.address]).stdout) < 0.15


PING = """
import socket, sys, time
started_s = time.monotonic()
socket.create_connection((sys.argv[1], 22), 20).close()
print(time.monotonic() - started_s)
"""


def test_what_a_killed_test_run_left_is_taken_down_by_the_next(ssh_keys, tmp_path):
    prefix = "ddptest"  # Else another test that starts here and now would take them down.
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from tests.support import nodes\nfrom tests.support.nodes import Keys, Lab\n"
        f"nodes.PREFIX = {prefix!r}\n"
        f"lab = Lab(Path({str(tmp_path)!r}), Keys(Path({str(ssh_keys.client.parent)!r})), 2).__enter__()\n"
        "print(lab.netns, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    name = done.stdout.strip()
    assert name.startswith(prefix)
    assert os.path.exists(f"/run/netns/{name}")
    remove_stale(prefix)
    assert not [entry for entry in os.listdir("/run/netns") if entry.startswith(name)]


def test_a_test_run_in_another_pid_namespace_takes_no_lab_down_that_is_in_use(make_lab):
    lab = make_lab(1)
    code = "from tests.support.nodes import remove_stale; remove_stale()"
    other = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    subprocess.run(other, cwd=ROOT, env=environment(), check=True)
    assert lab.run(["true"]).returncode == 0
    assert lab["node1"].run(["hostname"]).stdout == "node1\n"
