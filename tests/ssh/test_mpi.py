"""ddplaunch under a real mpirun: the process manager tells all tasks where to meet, also on two machines.

When the nodes have met, nothing depends on who started them: tests/slurm/test_hangs.py shows a launcher per worker.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.nodes import Lab
from tests.support.runs import start
from tests.support.ssh_jobs import ROUNDS

MPIRUNS = {
    "open-mpi": ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
    "mpich": ("mpiexec.mpich",),
}


@pytest.fixture(params=MPIRUNS)
def mpirun(request) -> tuple[str, ...]:
    words = MPIRUNS[request.param]
    if not shutil.which(words[0]):
        pytest.skip(f"needs {words[0]}")
    return words


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
    running = start(ROUNDS, end, under=on_two_machines(mpirun, make_lab(2), tmp_path))
    for rank in range(4):
        running.wait_for(f"rank {rank} of 4 in round 0")
    end.touch()
    finished = running.finish()
    assert finished.returncode == 0, finished.err
    folders = [Path(text) for text in re.findall(r", logs in (\S+)", finished.err)]
    assert len({path.parent for path in folders}) == 1
    assert sorted(path.suffix for path in folders) == [f".{rank}" for rank in range(4)]
