"""A fault of the hardware that has ended a run is remembered, with the command that drains the node in SLURM."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from tests.process.test_departure import HARDWARE, Job
from tests.support.runs import run


def test_a_hardware_fault_is_remembered_until_it_is_forgotten(tmp_path: Path) -> None:
    job = Job(tmp_path)
    done = run(*job.arguments(0), env={**job.environ, "SLURM_JOB_ID": "7"})
    assert done.returncode == HARDWARE, done.err
    host = os.uname().nodename.split(".")[0]
    assert f"later runs use {host} last, for 7 days" in done.err
    (command,) = (line for line in done.err.splitlines() if "scontrol update" in line)
    assert shlex.split(command)[-3:] == [
        f"nodename={host}",
        "state=drain",
        "reason=ddplaunch: Xid 79, GPU 3 has fallen off the bus",
    ]
    assert "Xid 79, GPU 3 has fallen off the bus" in run("--ps", "--nodes").out
    assert f"forgotten: 1 event of {host}" in run("--forget", host).err
    assert run("--ps", "--nodes").out == ""
