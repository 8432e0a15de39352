"""Every benchmark still runs, at its smallest size, and prints its figures; what they say is of no interest here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import nodes, slurm

FOLDER = Path(__file__).parents[2] / "scripts" / "bench"
STUB_IS_ENOUGH = {
    *("checkpoint_search", "detach", "environments", "hangs", "hosts", "idle", "late_gpu_memory", "logins"),
    *("long_job", "nodes", "output", "page", "scale", "silent_dns", "snapshot", "srun", "sync"),
}
"""Their jobs, and they themselves, use nothing of torch."""

INSTALLED_STUB = {"warm"}
"""Likewise, but a keeper needs an installed package."""

LAST_WORDS = {
    "detach": "throughput",
    "sample_cost": "with samples / without",
    "silent_dns": "with a silent name server",
    "slow_ranks": "with --hang-report off",
    "sync": "by the launcher alone",
    "warm": "launcher killed",
}
"""What a benchmark without a table prints last."""


def why_not(name: str) -> str:
    """What is missing here for this benchmark; empty if nothing is."""
    if name == "late_gpu_memory" and not shutil.which("gcc"):
        return "no gcc"
    if name == "environments" and not (os.geteuid() == 0 and os.path.exists("/dev/fuse")):
        return "no FUSE"
    if name in ("hosts", "logins", "nodes", "silent_dns", "srun", "sync", "warm"):
        return nodes.why_not() or (slurm.why_not() if name == "srun" else "")
    return ""


def benchmarks() -> list[pytest.param]:  # type: ignore[valid-type]
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("agents", "common"))
    return [pytest.param(name, marks=[] if name in STUB_IS_ENOUGH else pytest.mark.torch) for name in names]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", benchmarks())
def test_a_benchmark_runs_at_its_smallest_size(name: str, python_with_stub: str) -> None:
    if reason := why_not(name):
        pytest.skip(reason)
    done = subprocess.run(
        [python_with_stub if name in INSTALLED_STUB else sys.executable, FOLDER / f"{name}.py"],
        env={**os.environ, "BENCH_SMALLEST": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert LAST_WORDS.get(name, "|---|") in done.stdout, done.stdout + done.stderr
