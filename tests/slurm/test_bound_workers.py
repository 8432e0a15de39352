"""--numa-binding in an allocation: workers that srun's agents have started bind themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.test_environment import bound_to
from tests.slurm.test_allocation import salloc
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.features]

SHOW = """
import os
from ddplaunch.features.numa.binding import has_memory_policy as told
print("bound", *os.sched_getaffinity(0), told(), flush=True)
"""


def test_workers_of_all_nodes_are_bound(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These nodes have no GPUs, so the choice is given: tests/unit/test_numa.py has what is chosen."""
    env = bound_to("CPUs 0, memory of NUMA node 0", tmp_path)
    (tmp_path / "show.py").write_text(SHOW)
    options = ("--nproc-per-node", "2", "--numa-binding", "node")
    done = salloc(slurm, "-N2", *options, "-x", f"PYTHONPATH={env['PYTHONPATH']}", tmp_path / "show.py").finish()
    assert done.returncode == 0, done.err
    assert [line.split()[-3:] for line in done.out.splitlines()] == [["bound", "0", "True"]] * 4


def test_without_gpus_nothing_is_bound_by_itself_and_a_choice_is_refused(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    done = salloc(slurm, "-N2", "--nproc-per-node", "1", tmp_path / "show.py").finish()
    assert done.returncode == 0, done.err
    assert [line.split()[-1] for line in done.out.splitlines()] == ["False"] * 2
    refused = salloc(slurm, "-N2", "--nproc-per-node", "1", "--numa-binding", "node", tmp_path / "show.py").finish()
    assert refused.returncode != 0
    assert "--numa-binding needs a GPU for each of 1 workers, and 0 can be used" in refused.err
