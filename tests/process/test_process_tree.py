"""When a run has ended, so has everything that any of its workers has started, however it hides."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.processes import is_alive, wait_until
from tests.support.runs import PROGRAMS, Finished, run, start

ESCAPE = PROGRAMS / "escape.py"
KINDS = ("plain", "session", "daemon", "thread", "holds stdout", "bare")


def left_behind(lines: list[str]) -> dict[str, int]:
    """What the workers have started, by kind, as their lines say."""
    found = [line.partition("left ")[2].partition(" (pid: ") for line in lines if "left " in line and "(pid: " in line]
    return {f"{kind} {number}": int(pid.rstrip(")")) for number, (kind, _, pid) in enumerate(found)}


def assert_gone(finished: Finished, at_least: int) -> None:
    pids = left_behind(finished.out.splitlines())
    assert len(pids) >= at_least, finished.out
    assert [kind for kind, pid in pids.items() if is_alive(pid)] == []
    assert finished.report["unkillable_pids"] == []


@pytest.mark.parametrize(
    ("start_method", "end", "code"),
    [("forkserver", "code:0", 0), ("spawn", "code:0", 0), ("forkserver", "code:3", 3), ("forkserver", "signal:9", 137)],
)
def test_nothing_a_worker_started_outlives_the_run(start_method: str, end: str, code: int) -> None:
    finished = run("--start-method", start_method, "--nproc-per-node", "2", ESCAPE, end, "bare")
    assert finished.returncode == code, finished.err
    # A rank that fails ends the other, which may not have come that far.
    assert_gone(finished, len(KINDS) * (1 if code else 2))


def test_nothing_of_an_attempt_is_left_in_the_next_and_nothing_after_a_stop(start_method: str) -> None:
    """torchrun: multiprocessing_api_test 4."""
    running = start("--start-method", start_method, "--max-restarts", "1", ESCAPE, "code:1,wait", "bare")
    running.wait_for(r"ready \(pid", 2)
    first = list(left_behind(running.lines).values())[: len(KINDS)]
    assert [pid for pid in first if is_alive(pid)] == []
    running.signal(signal.SIGTERM)
    finished = running.finish()
    assert finished.returncode == 143
    assert_gone(finished, len(KINDS) * 2)


@pytest.mark.torch
def test_data_loader_workers_do_not_outlive_their_rank() -> None:
    finished = run("--nproc-per-node", "1", PROGRAMS / "load_data.py")
    assert finished.returncode == 137, finished.err
    assert_gone(finished, 2)


def test_what_a_rank_left_in_its_group_goes_with_it_while_others_run() -> None:
    running = start("--nproc-per-node", "2", PROGRAMS / "leave_child.py")
    pid = int(running.wait_for(r"left child \(pid: (\d+)\)")[0][1])
    wait_until(lambda: not is_alive(pid))
    assert running.process.poll() is None
    running.signal(signal.SIGTERM)
    assert running.finish().returncode == 143


def test_a_child_that_holds_stdout_does_not_hold_up_the_end() -> None:
    running = start("--nproc-per-node", "1", ESCAPE, "code:0")
    finished = running.finish(20)
    assert finished.returncode == 0
    assert_gone(finished, len(KINDS) - 1)


def test_a_daemon_that_forks_and_exits_again_and_again_is_caught(tmp_path: Path) -> None:
    fifo = tmp_path / "held"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(reader, "rb", buffering=0) as held:
        finished = run("--nproc-per-node", "1", PROGRAMS / "fork_on.py", fifo)
        assert finished.returncode == 0, finished.err
        assert "ready" in finished.out
        assert held.read(1) == b"", "somebody still holds it"
