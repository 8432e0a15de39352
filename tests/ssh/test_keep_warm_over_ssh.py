"""--keep-warm on other machines: each node keeps its own, the next run takes them over, and they end with --kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.nodes import Lab
from tests.support.processes import wait_until
from tests.support.runs import PROGRAMS
from tests.support.ssh_jobs import job, pid_on

pytestmark = [pytest.mark.ssh, pytest.mark.slow]

TAKEN = "torch was imported by an earlier run"
MEET = """
import os
from torch.distributed import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
rank = int(os.environ["RANK"])
store.set(str(rank), "here")
store.get(str(1 - rank))
print("met by", os.environ["GLOO_SOCKET_IFNAME"])
"""


def sockets() -> list[Path]:
    return list(Path(os.environ["XDG_STATE_HOME"], "ddplaunch").glob("warm-*.sock"))


@pytest.mark.usefixtures("stub_is_installed")
def test_the_next_run_takes_over_what_was_left_on_each_node(make_lab: type[Lab], tmp_path: Path) -> None:
    lab, script = make_lab(2), tmp_path / "meet.py"
    script.write_text(MEET)
    options = ("-v", "--nproc-per-node", "1")
    first = job(lab, *options, "--keep-warm", "5m", script).finish()
    assert first.returncode == 0, first.err
    assert first.err.count("torch is imported anew: none was left yet") == 2
    wait_until(lambda: len(sockets()) == 2, 60)
    keepers = {name: pid_on(lab[name], "ddplaunch keeper") for name in ("node1", "node2")}

    second = job(lab, *options, script).finish()
    assert second.returncode == 0, second.err
    assert [second.err.count(f"{name}: {TAKEN}") for name in keepers] == [1, 1], second.err
    assert sorted(second.out.splitlines()) == sorted(first.out.splitlines())
    assert second.out.count("met by ") == 2

    third = job(lab, *options, "--shutdown-timeout", "1", PROGRAMS / "print_signals.py", "60")
    third.wait_for(r"ready \(pid", 2)
    os.kill(pid_on(lab["node2"], "DDPLAUNCH_START"), signal.SIGKILL)
    assert third.finish().returncode != 0
    assert not [line for line in lab["node2"].pids().values() if "print_signals" in line]

    killed = job(lab, "--kill", "warm").finish()
    assert (killed.returncode, "keeper" in killed.err) == (0, True), killed.err
    wait_until(lambda: not any("keeper" in line for node in lab.nodes for line in node.pids().values()))
