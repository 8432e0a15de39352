"""--ps finds what runs have on this machine, --kill ends one of them, and nothing else is touched."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddplaunch.protocol import environment as worker_environment
from ddplaunch.system import cgroup
from ddplaunch.system.files import run_folder
from tests.support.processes import is_alive, wait_until
from tests.support.runs import PROGRAMS, Finished, Running, command, environment, run, start

ESCAPE, PRINT_SIGNALS = PROGRAMS / "escape.py", PROGRAMS / "print_signals.py"
USAGE = 2

StartLeftover = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start_leftover() -> Iterator[StartLeftover]:
    """Starts a process that carries a mark and nothing else of a run; ``under`` is a command that starts it."""
    with contextlib.ExitStack() as stack:

        def begin(mark: str, *under: str, run_id: str = "") -> subprocess.Popen[bytes]:
            marks = {worker_environment.RUN_ID: mark, worker_environment.TORCHELASTIC_RUN_ID: run_id}
            process = subprocess.Popen([*under, "sleep", "60"], env=environment(marks))
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield begin


def rows(run_id: str, *options: str) -> list[tuple[str, str]]:
    """State and processes, as --ps shows them, of what has this id."""
    finished = run("--ps", *options)
    assert finished.returncode == 0, finished.err
    lines = [re.split(r"\s{2,}", line) for line in finished.out.splitlines()]
    assert all(len(line) == 6 for line in lines), finished.out
    return [(without_time(line[1]), line[4]) for line in lines if line[0] == run_id]


def without_time(state: str) -> str:
    match = re.fullmatch(r"(running|left over) (\d+m)?\d+s", state)
    assert match, state
    return match[1]


def past_runs() -> dict[str, list[str]]:
    """Result, command and cause by run id, as --ps --all shows them."""
    finished = run("--ps", "--all")
    assert finished.returncode == 0, finished.err
    lines = [re.split(r"\s{2,}", line) for line in finished.out.splitlines()]
    return {line[0]: line[3:] for line in lines}


def kill(run_id: str, grace_s: float = 30) -> Finished:
    return run("--kill", run_id, "--shutdown-timeout", str(grace_s))


def escaped(running: Running, count: int) -> list[int]:
    return [int(match[1]) for match in running.wait_for(r"left .* \(pid: (\d+)\)", count)]


def kill_launcher_and_agent(running: Running) -> None:
    for pid in (running.pid, running.agent_pid())[::-1]:
        os.kill(pid, signal.SIGSTOP)  # So that neither notices the other's end.
    for pid in (running.agent_pid(), running.pid):
        os.kill(pid, signal.SIGKILL)
    running.finish()


def test_what_a_killed_run_has_left_is_listed_and_ended_and_another_run_is_not_touched(run_id: str) -> None:
    other = start("--rdzv-id", f"{run_id}-b", PRINT_SIGNALS)
    has_cgroup = cgroup.create("probe")[0]
    if has_cgroup:
        has_cgroup.rmdir()
    bare = ("bare",) if has_cgroup else ()
    running = start("--rdzv-id", run_id, ESCAPE, "wait", *bare)
    pids = escaped(running, 6 if has_cgroup else 5)
    other.wait_for(r"ready \(pid")
    kill_launcher_and_agent(running)
    wait_until(lambda: rows(run_id) == [("left over", f"{len(pids)} others")])
    ((state, processes),) = rows(f"{run_id}-b")
    assert (state, processes) == ("running", "1 launcher, 1 agent, 1 forkserver, 1 worker")

    past = past_runs()
    assert past[run_id] == ["killed", shlex.join((*command("--rdzv-id", run_id, ESCAPE, "wait"), *bare))]
    assert past[f"{run_id}-b"][0] == "running"
    assert any(f"{run_id}-b" in line and f"  {PRINT_SIGNALS}  " in line for line in run("--ps").out.splitlines())

    interrupted = start("--kill", run_id, "--shutdown-timeout", "60")  # What has escaped ignores SIGTERM.
    interrupted.wait_for("SIGKILL in 60 s; in 75 s for its launcher and agents")
    interrupted.signal(signal.SIGINT)
    assert interrupted.finish().returncode == 128 + signal.SIGINT
    finished = kill(run_id, 0.2)
    assert (finished.returncode, finished.out) == (0, "")
    assert f"ended {len(pids)} others" in finished.err
    assert not any(map(is_alive, pids))
    assert rows(run_id) == []
    if has_cgroup:
        assert not any(mark.startswith(f"{run_id}.") for _, mark in cgroup.of_runs())

    finished = kill(f"{run_id}-b")
    assert finished.returncode == 0, finished.err
    assert "ended 1 launcher, 1 agent" in finished.err
    assert other.finish().returncode == 128 + signal.SIGTERM
    assert "got SIGTERM" in "".join(other.lines)
    assert past_runs()[f"{run_id}-b"][::2] == ["exit 143", "SIGTERM"]


def test_what_a_node_has_left_is_found_by_the_run_id_of_all_nodes(start_leftover: StartLeftover) -> None:
    own, of_all = run_folder.new_run_id(), run_folder.new_run_id()
    process = start_leftover(own, run_id=of_all)
    wait_until(lambda: rows(of_all) == [("left over", "1 other")])
    assert rows(own) == []
    finished = kill(of_all)
    assert finished.returncode == 0, finished.err
    assert process.wait(5) == -signal.SIGTERM


def test_an_agent_that_is_stopped_while_its_launcher_dies_is_woken_to_end_its_workers(run_id: str) -> None:
    running = start("--rdzv-id", run_id, PRINT_SIGNALS)
    running.wait_for(r"ready \(pid")
    agent = running.agent_pid()
    os.kill(agent, signal.SIGSTOP)
    running.signal(signal.SIGKILL)
    running.process.wait()
    assert rows(run_id) == [("left over", "1 agent, 1 forkserver, 1 worker")]
    finished = kill(run_id)
    assert finished.returncode == 0, finished.err
    assert not is_alive(agent)
    running.finish()


def test_a_run_whose_workers_do_not_want_to_end_is_killed_after_the_grace(run_id: str) -> None:
    running = start("--rdzv-id", run_id, PROGRAMS / "ignore_sigterm.py")
    running.wait_for("ready")
    finished = kill(run_id, 0.2)
    assert finished.returncode == 0, finished.err
    assert running.finish().returncode == 128 + signal.SIGTERM


def test_the_last_run_is_ended_and_a_run_that_has_ended_is_said_to_have(run_id: str) -> None:
    running = start("--rdzv-id", run_id, PRINT_SIGNALS)
    running.wait_for(r"ready \(pid")
    shown = run("--stacks", "last")
    assert shown.returncode == 0, shown.err
    finished = kill("last")
    assert finished.returncode == 0, finished.err
    assert f"ending {run_id} on each machine: SIGTERM" in finished.err
    assert running.finish().returncode == 128 + signal.SIGTERM
    for option in ("--kill", "--stacks"):
        refused = run(option, run_id)
        assert refused.returncode == USAGE
        assert f"{option} {run_id}: the run has ended, and no process of it is left here" in refused.err


def test_a_live_run_with_another_state_folder_is_found_by_its_id_and_is_not_the_last(
    run_id: str, tmp_path: Path
) -> None:
    running = start("--rdzv-id", run_id, PRINT_SIGNALS)
    running.wait_for(r"ready \(pid")
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "elsewhere")}
    for option in ("--logs", "--ps"):
        assert "no run of yours with this id" in run(option, "last", env=elsewhere).err
        assert run(option, run_id, env=elsewhere).returncode == 0
        assert run(option, "last").returncode == 0
    running.signal(signal.SIGTERM)
    assert running.finish().returncode == 128 + signal.SIGTERM


def test_only_the_run_with_that_very_id_is_ended(run_id: str, start_leftover: StartLeftover) -> None:
    ours = [start_leftover(f"{run_id}.0a1b2c"), start_leftover(f"{run_id}.0a1b2d.3")]
    others = [start_leftover(mark) for mark in (f"{run_id}.1.0a1b2c", f"{run_id}1.0a1b2c", f"x{run_id}.0a1b2c")]
    assert rows(run_id) == [("left over", "2 others")]
    finished = kill(run_id)
    assert finished.returncode == 0, finished.err
    assert [process.wait(5) for process in ours] == [-signal.SIGTERM] * 2
    assert [process.poll() for process in others] == [None] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
def test_another_users_process_is_neither_listed_nor_ended(run_id: str, start_leftover: StartLeftover) -> None:
    ours = start_leftover(f"{run_id}.0a1b2c")
    theirs = start_leftover(f"{run_id}.0a1b2c", "setpriv", "--reuid", "65534", "--clear-groups")
    wait_until(lambda: os.stat(f"/proc/{theirs.pid}").st_uid == 65534)
    assert rows(run_id) == [("left over", "1 other")]
    assert kill(run_id).returncode == 0
    assert ours.wait(5) == -signal.SIGTERM
    assert theirs.poll() is None


def test_an_id_that_nobody_has_is_refused_with_those_that_are_there(run_id: str, start_leftover: StartLeftover) -> None:
    start_leftover(f"{run_id}.0a1b2c")
    finished = kill(f"{run_id}-none")
    assert finished.returncode == USAGE
    assert "no run of yours has this id" in finished.err
    assert run_id in finished.err.partition("There are: ")[2]


def test_a_part_of_the_run_cannot_end_it(run_id: str) -> None:
    finished = run("--kill", run_id, env={worker_environment.RUN_ID: f"{run_id}.0a1b2c.1"})
    assert finished.returncode == USAGE
    assert "this command is a part of that run" in finished.err


@pytest.mark.parametrize(
    "options",
    [
        ["--ps", "train.py"],
        ["--ps", "--kill", "x"],
        ["--kill", "x", "--plan"],
        ["--stacks", "x", "--ps"],
        ["--stacks", "x", "train.py"],
        ["--check", "--stacks", "x"],
    ],
)
def test_they_are_done_alone(options: list[str]) -> None:
    assert run(*options).returncode == USAGE
