"""A real kill for memory is seen: a process allocates beyond its memory cgroup's limit and the counters rise."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

import ddplaunch
from ddplaunch.agent.oom import OomCounters, blames

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_BYTES = 96 << 20
GREEDY = f"data = b'x' * {LIMIT_BYTES * 2}"

# Joins the cgroup ("0" is whoever writes), so that its children are in it from their first page on.
PROGRAM = """
import json, pathlib, subprocess, sys
from dataclasses import asdict
from ddplaunch.agent.oom import OomCounters
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
before = OomCounters.read()
returncode = subprocess.run([sys.executable, "-c", sys.argv[2]]).returncode
print(json.dumps([returncode, asdict(before), asdict(OomCounters.read())]))
"""


def cannot_run(reason: str) -> NoReturn:
    """Skip on a laptop; fail where everything must run."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def make_cgroup_v1(folder: Path) -> None:
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    # Not there without swap accounting.
    with contextlib.suppress(OSError):
        (folder / "memory.memsw.limit_in_bytes").write_text(str(LIMIT_BYTES))


def make_cgroup_v2(folder: Path) -> None:
    if "memory" not in (folder.parent / "cgroup.subtree_control").read_text().split():
        (folder.parent / "cgroup.subtree_control").write_text("+memory")
    folder.mkdir()
    (folder / "memory.max").write_text(str(LIMIT_BYTES))
    with contextlib.suppress(OSError):
        (folder / "memory.swap.max").write_text("0")


def remove_cgroup(folder: Path, timeout_s: float = 10) -> None:
    """Kill what is in it and remove it; a cgroup stays busy until its dead are reaped."""
    deadline = time.monotonic() + timeout_s
    while folder.exists():
        for pid in map(int, (folder / "cgroup.procs").read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


@pytest.fixture
def limited_cgroup() -> Iterator[Path]:
    """A memory cgroup of its own with room for two interpreters and not for ``GREEDY``."""
    mount = Path("/sys/fs/cgroup")
    is_v1 = (mount / "memory/memory.limit_in_bytes").exists()
    folder = (mount / "memory" if is_v1 else mount) / f"ddplaunch-test-{os.getpid()}"
    try:
        try:
            (make_cgroup_v1 if is_v1 else make_cgroup_v2)(folder)
        except OSError as error:
            cannot_run(f"no memory cgroup can be made here: {error}")
        yield folder
    finally:
        remove_cgroup(folder)


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
    assert blames(before, after)
    assert blames(outside, OomCounters.read()), "the kill must be seen from outside the victim's cgroup too"


def test_a_kill_by_someone_else_is_not_blamed_on_memory(limited_cgroup: Path) -> None:
    returncode, before, after = run_in(limited_cgroup, "import os; os.kill(os.getpid(), 9)")
    assert returncode == -signal.SIGKILL
    assert after.cgroup == before.cgroup == 0
