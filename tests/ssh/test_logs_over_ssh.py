"""--logs over SSH: log files of other machines, whole, part by part, while they grow; and what it says of others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.ssh.test_collect_logs import THERE
from tests.support.detached import JOB
from tests.support.nodes import Lab
from tests.support.processes import wait_until
from tests.support.runs import Running, start
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh

NODE_NOT_READY = 82
SPEAK = (
    r'printf "out %s \033[31m\n" $RANK; echo "err $RANK" >&2; until [ -e "$0" ]; do sleep 0.1; done; echo "end $RANK"'
)
LINES = 12_000_000
"""100 MB."""

LEAST_BYTES = 64 << 20
"""What the command takes without any data, and some more."""


def logs(lab: Lab, *arguments: str | Path, hosts: str = "node[1-2]", **popen: int) -> Running:
    """``--logs`` on the lab's machine for launchers."""
    env = {"XDG_STATE_HOME": os.environ["XDG_STATE_HOME"]}
    given = ("--hosts", hosts, "--ssh-config", lab.ssh_config, "-x", "DDPLAUNCH_TEST_MARK")
    return start("--logs", *arguments, *given, under=lab.prefix, env=env, **popen)


def speaking(lab: Lab, go: Path) -> Running:
    """A run of two nodes whose log files are on the nodes only; it goes on until ``go`` is there."""
    options = ("--rdzv-id", JOB, "-x", THERE, "--nproc-per-node", "2", "--no-python")
    running = job(lab, *options, "sh", "-c", SPEAK, go)
    running.wait_for("err 3")
    return running


def test_log_files_of_other_machines_are_printed_while_the_run_goes_on_and_after_it(make_lab, tmp_path):
    lab, go = make_lab(2), tmp_path / "go"
    running = speaking(lab, go)
    running.wait_for(
        rf"4 workers on 2 nodes, logs are on each node \(ddplaunch --logs {JOB} prints them\), the report in /"
    )
    one = logs(lab, JOB, "--ranks", "3", "--stdout").finish()
    assert (one.returncode, one.out, one.err) == (0, "out 3 \033[31m\n", "")
    following = logs(lab, JOB, "--ranks", "1-2", "-f")
    following.wait_for("err [12]", 2)
    go.touch()
    followed = following.finish()
    assert running.finish().returncode == 0
    assert followed.returncode == 0, followed.err
    assert {"end 1", "end 2", "==> rank 1 on node1, stdout <==", "==> rank 2 on node2, stderr <=="} <= {
        *followed.out.splitlines()
    }
    every = logs(lab, JOB, "--stderr").finish()
    assert every.out == "\n".join(
        f"==> rank {rank} on node{rank // 2 + 1}, stderr <==\nerr {rank}\n" for rank in range(4)
    )
    wait_until(lambda: not lab.leftovers())


@pytest.mark.slow
def test_a_large_file_comes_whole_and_takes_little_memory(make_lab):
    lab = make_lab(1)
    program = ("--nproc-per-node", "1", "--no-python", "sh", "-c", f"seq {LINES}")
    assert job(lab, "--rdzv-id", JOB, "-x", THERE, "-r", "3", *program).finish().returncode == 0
    whole = subprocess.run(["seq", str(LINES)], capture_output=True, check=True).stdout
    reader, writer = os.pipe()
    reading = logs(lab, JOB, "--stdout", hosts="node1", stdout=writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        most = file.read(len(whole) - (1 << 20))  # It waits for room in the pipe: more than that is still to come.
        peak_kb = int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{reading.pid}/status").read_text())[0])
        assert most + file.read() == whole
    assert reading.finish().returncode == 0
    assert peak_kb << 10 < LEAST_BYTES + len(whole) // 2


def test_ctrl_c_ends_it_at_once_also_while_hosts_do_not_answer(make_lab, tmp_path):
    lab, go = make_lab(2), tmp_path / "go"
    running = speaking(lab, go)
    reading = logs(lab, JOB, "-f")
    reading.wait_for("err 3")
    for node in lab.nodes:
        node.unplug()
    go.touch()
    asked_at = time.monotonic()
    reading.signal(signal.SIGINT)
    assert reading.finish().returncode == 128 + signal.SIGINT
    assert time.monotonic() - asked_at < 5, "5 s for each host"
    for node in lab.nodes:
        node.replug()
    running.finish()


def test_a_host_that_cannot_be_reached_and_a_file_that_is_gone_give_a_line_each_and_the_others_are_printed(
    make_lab, tmp_path
):
    lab, go = make_lab(2), tmp_path / "go"
    go.touch()
    assert speaking(lab, go).finish().returncode == 0
    path = f"/run/state/ddplaunch/{JOB}/node1/attempt_0/1/stderr.log"
    lab["node1"].run(["rm", path])
    lab["node2"].crash()
    some = logs(lab, JOB, "--stderr").finish()
    assert some.returncode == NODE_NOT_READY, some.err
    assert some.out == "==> rank 0 on node1, stderr <==\nerr 0\n"
    lost, gone, last = some.err.splitlines()[:3]
    assert lost.startswith("ddplaunch: node2, ranks 2-3: ")
    assert gone == f"ddplaunch: node1, rank 1: {path}: No such file or directory"
    assert last == f"ddplaunch: error: --logs {JOB}: not all log files could be read"
    others = logs(lab, JOB, "--ranks", "3", hosts="node1").finish()
    assert (others.returncode, others.out) == (NODE_NOT_READY, "")
    assert others.err.splitlines()[0] == "ddplaunch: node2, rank 3: it is none of --hosts"
