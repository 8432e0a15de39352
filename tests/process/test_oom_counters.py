"""A real kill for memory is seen: a process allocates beyond its memory cgroup's limit and the counters rise."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch.agent.workers.exit_details import OomCounters, killed_for_memory
from tests.support.cgroups import limited_memory

LIMIT_BYTES = 96 << 20
GREEDY = f"data = b'x' * {LIMIT_BYTES * 2}"

# Joins the cgroup ("0" is whoever writes), so that its children are in it from their first page on.
PROGRAM = """
import json, pathlib, subprocess, sys
from dataclasses import asdict
from ddplaunch.agent.workers.exit_details import OomCounters
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
before = OomCounters.read()
returncode = subprocess.run([sys.executable, "-c", sys.argv[2]]).returncode
print(json.dumps([returncode, asdict(before), asdict(OomCounters.read())]))
"""


@pytest.fixture
def limited_cgroup() -> Iterator[Path]:
    """A memory cgroup of its own with room for two interpreters and not for ``GREEDY``."""
    with limited_memory(LIMIT_BYTES) as folder:
        yield folder


def run_in(cgroup: Path, source: str) -> tuple[int, OomCounters, OomCounters]:
    """Run ``source`` in the cgroup: its returncode, and the counters before and after as seen from inside."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cgroup), source],
        cwd=Path(ddplaunch.__file__).parents[1],
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    returncode, before, after = json.loads(done.stdout)
    return returncode, OomCounters(**before), OomCounters(**after)


def test_a_kill_for_memory_raises_the_machines_and_the_cgroups_counter(limited_cgroup: Path) -> None:
    outside = OomCounters.read()
    returncode, before, after = run_in(limited_cgroup, GREEDY)
    assert returncode == -signal.SIGKILL
    assert after.machine > before.machine
    assert after.cgroup == before.cgroup + 1
    assert killed_for_memory(before, after) == "yes"
    assert killed_for_memory(outside, OomCounters.read()) == "perhaps", (
        "the kill must be seen from outside the cgroup too"
    )


def test_a_kill_by_someone_else_is_not_blamed_on_memory(limited_cgroup: Path) -> None:
    returncode, before, after = run_in(limited_cgroup, "import os; os.kill(os.getpid(), 9)")
    assert returncode == -signal.SIGKILL
    assert after.cgroup == before.cgroup == 0
