"""A rank stops in a debugger in a SLURM job: one launcher for all nodes has a terminal, one for each node has none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.debugging import STOP, Debugger
from tests.support.runs import command
from tests.support.slurm import Slurm

pytestmark = pytest.mark.slurm


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(STOP)
    return path


def test_a_rank_on_another_node_has_the_terminal_of_salloc(slurm: Slurm, screen: Debugger, script: Path) -> None:
    started = command("--nproc-per-node", "1", script, "0", "1")
    running = slurm.start(["setsid", "--ctty", "salloc", "-N2", "--quiet", *started], **screen.streams)
    assert b"rank 0 on node01 stopped at breakpoint() (job.py:7) and has the terminal" in screen.prompted()
    assert b"rank 1 on node02 stopped" in screen.say("c")
    assert b"\n17\n" in screen.say("p x")
    screen.enter("c")
    assert running.finish().returncode == 0
    assert screen.settings() == screen.before


def test_without_a_terminal_all_nodes_fail_at_once_with_one_code(slurm: Slurm, script: Path) -> None:
    options = ("--nproc-per-node", "1", "--max-restarts", "2")
    done = slurm.start(["srun", "-N2", "--ntasks-per-node=1", *command(*options, script, "1")]).finish()
    assert done.returncode == 93
    assert re.search(r"rank 1 on node02 gave up: stopped at breakpoint\(\) \(job.py:7\), and there is no ter", done.err)
