"""ddplaunch under a real mpirun: the process manager tells all tasks where to meet, on one machine and on two."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.hangs import HANG_OPTIONS, assert_reported_once
from tests.support.nodes import Lab
from tests.support.runs import PROGRAMS, Running, start
from tests.support.ssh_jobs import ROUNDS

MPIRUNS = {
    "open-mpi": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    "mpich": ("mpiexec.mpich",),
}


def installed(name: str) -> tuple[str, ...]:
    words = MPIRUNS[name]
    if not shutil.which(words[0]):
        pytest.skip(f"needs {words[0]}")
    return words


@pytest.fixture(params=MPIRUNS)
def mpirun(request) -> tuple[str, ...]:
    return installed(request.param)


def assert_all_meet(running: Running, size: int, end: Path) -> None:
    for rank in range(size):
        running.wait_for(f"rank {rank} of {size} in round 0")
    end.touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err
    folders = [Path(text) for text in re.findall(r"logs in (\S+)", finished.err)]
    assert len({path.parent for path in folders}) == 1
    assert sorted(path.suffix for path in folders) == [f".{rank}" for rank in range(size)]


def test_the_tasks_of_one_machine_meet(mpirun, tmp_path):
    end = tmp_path / "end"
    assert_all_meet(start(ROUNDS, end, under=(*mpirun, "-np", "2")), 2, end)


def on_two_machines(mpirun: tuple[str, ...], lab: Lab, tmp_path: Path) -> tuple[str, ...]:
    """The command that starts two tasks on each of two machines."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec ssh -F {lab.ssh_config} "$@"\n')
    ssh.chmod(0o755)
    names = ("DDPLAUNCH_TEST_MARK", "XDG_STATE_HOME", "PYTHONPATH")
    if "openmpi" in mpirun[0]:
        passed = [word for name in names for word in ("-x", name)]
        words = ["--mca", "plm_rsh_agent", str(ssh), "-H", "node1:2,node2:2", "--map-by", "ppr:2:node", *passed]
    else:
        words = ["-launcher", "ssh", "-launcher-exec", str(ssh), "-hosts", "node1,node2", "-ppn", "2", "-np", "4"]
    return *lab.prefix, *mpirun, *words


def test_the_tasks_of_two_machines_meet(mpirun, make_lab, tmp_path):
    end = tmp_path / "end"
    assert_all_meet(start(ROUNDS, end, under=on_two_machines(mpirun, make_lab(2), tmp_path)), 4, end)


@pytest.mark.slow
@pytest.mark.torch
def test_a_hang_is_reported_once_and_ended_on_both_machines(make_lab, tmp_path):
    """When the nodes have met, nothing depends on who started them: one mpirun shows it."""
    under = on_two_machines(installed("mpich"), make_lab(2), tmp_path)
    done = start(*HANG_OPTIONS, "--log-dir", tmp_path / "logs", PROGRAMS / "hangs.py", "lock", under=under).finish()
    assert done.returncode == 87, done.err
    reports = [json.loads(path.read_text()) for path in (tmp_path / "logs").rglob("report.json")]
    assert len(reports) == 4
    assert_reported_once(done, reports, " on node2")
