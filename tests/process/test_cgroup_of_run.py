"""Where there can be one, a run's workers are in a cgroup of their own, attempt after attempt; it goes with the run."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddplaunch.system import cgroup
from tests.support.processes import is_alive, wait_until
from tests.support.runs import PROGRAMS, run, start


@pytest.fixture
def run_id() -> Iterator[str]:
    made, reason = cgroup.create("probe")
    if made is None:
        pytest.skip(reason)
    assert cgroup.remove(made, time.monotonic() + 10)
    run_id = f"test-{uuid.uuid4().hex}"
    yield run_id
    for folder in folders_of(run_id):
        cgroup.kill(folder)
        cgroup.remove(folder, time.monotonic() + 10)


def folders_of(run_id: str) -> list[Path]:
    mount, _ = cgroup._find_own(Path("/"))
    return list(mount.rglob(f"ddplaunch-{run_id}.*"))


def test_every_attempt_is_in_the_runs_cgroup_and_none_is_left(start_method: str, run_id: str) -> None:
    options = ["--start-method", start_method, "--rdzv-id", run_id, "--max-restarts", "1", "-v"]
    finished = run(*options, PROGRAMS / "exit_in_cgroup.py")
    assert finished.returncode == 3, finished.err
    first, second = [line for line in finished.out.splitlines() if line.startswith("in 0::")]
    assert first == second
    assert f"/ddplaunch-{run_id}." in first
    assert "no cgroup" not in finished.err
    assert not folders_of(run_id)


def test_a_killed_agents_cgroup_is_emptied_of_what_carries_no_mark_and_removed(run_id: str) -> None:
    running = start("--rdzv-id", run_id, PROGRAMS / "escape.py", "wait", "bare")
    running.wait_for(r"ready \(pid")
    pids = [int(match[1]) for match in running.wait_for(r"left .* \(pid: (\d+)\)", 6)]
    assert len(folders_of(run_id)) == 1
    os.kill(running.agent_pid(), signal.SIGKILL)
    running.finish()
    wait_until(lambda: not any(map(is_alive, pids)))
    assert not folders_of(run_id)
