"""Over SSH all hosts run one snapshot, which lies on a file system that they share; a host without it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import run
from tests.support.ssh_jobs import job

pytestmark = pytest.mark.ssh

TRAIN = """
import os, pathlib, sys
print("runs", os.environ["RANK"], "in attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    pathlib.Path("train.py").write_text("raise SystemExit('edited')")
    sys.exit(1)
"""


def test_all_hosts_run_one_snapshot_after_a_restart_too(make_lab, tmp_path: Path):
    lab = make_lab(2)
    (tmp_path / "train.py").write_text(TRAIN)
    options = ("--snapshot", "--max-restarts", "1", "--nproc-per-node", "1", "--log-dir", tmp_path / "logs")
    finished = job(lab, *options, "train.py", cwd=tmp_path).finish()
    assert finished.returncode == 0, finished.err
    assert [finished.out.count(f"runs {rank} in attempt 1") for rank in (0, 1)] == [1, 1]


def test_a_host_without_the_snapshot_is_named(make_lab, tmp_path: Path):
    """The second host has another file system over the logs."""
    lab = make_lab(2)
    (tmp_path / "train.py").write_text(TRAIN)
    (logs := tmp_path / "logs").mkdir()
    taken = run("--take-snapshot", "--log-dir", logs, "train.py", cwd=tmp_path).out.strip()
    lab["node2"].run(["mount", "-t", "tmpfs", "none", str(logs)])
    options = ("--use-snapshot", taken, "--nproc-per-node", "1", "--log-dir", tmp_path / "more logs")
    finished = job(lab, *options, "-m", "train", cwd=tmp_path).finish()
    assert finished.returncode == 82, finished.err
    assert f"node2: there is no snapshot {taken} here" in finished.err
