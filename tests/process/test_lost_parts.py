"""Whichever of our own processes is killed, whenever: the rest of the run ends in time, and says what was lost."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import children, command_line, is_alive, pids_with, wait_until
from tests.support.runs import PROGRAMS, SLOW_IMPORT, Finished, Running, environment, start

PRINT_SIGNALS = PROGRAMS / "print_signals.py"
EXIT_WITH = PROGRAMS / "exit_with.py"
ESCAPE = PROGRAMS / "escape.py"

NODE_LOST = 84
INTERNAL = 80


def assert_nothing_left(timeout_s: float = 10) -> None:
    mark = f"DDPLAUNCH_TEST_MARK={os.environ['DDPLAUNCH_TEST_MARK']}"
    wait_until(lambda: not pids_with(mark), timeout_s, f"left: {pids_with(mark)}")


def while_importing(running: Running) -> None:
    running.forkserver_pid()


def while_running(running: Running) -> None:
    running.wait_for(r"ready \(pid", 2)


def while_stopping(running: Running) -> None:
    while_running(running)
    running.signal(signal.SIGTERM)
    running.wait_for("got SIGTERM", 2)


def while_restarting(running: Running) -> None:
    pid = int(running.wait_for(r"ready \(pid: (\d+)", 2)[0][1])
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))


PHASES = [while_importing, while_running, while_stopping, while_restarting]
BOTH_WAYS = [*(("forkserver", phase) for phase in PHASES), ("spawn", while_running)]
"""Exec'd workers import for themselves; how a stop or a restart goes on does not depend on how a worker was started."""


def start_in(phase: Callable[[Running], None], start_method: str) -> Running:
    running = start(
        *("--start-method", start_method, "--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "1"),
        *(PRINT_SIGNALS, "60"),
        env=SLOW_IMPORT if phase is while_importing else None,
    )
    phase(running)
    return running


@pytest.mark.parametrize(("start_method", "phase"), BOTH_WAYS)
def test_a_killed_launcher_leaves_nothing(start_method: str, phase: Callable[[Running], None]) -> None:
    running = start_in(phase, start_method)
    running.signal(signal.SIGKILL)
    assert running.finish().returncode == -signal.SIGKILL
    assert_nothing_left()


@pytest.mark.parametrize(("start_method", "phase"), BOTH_WAYS)
def test_a_killed_agent_is_told_of_and_leaves_nothing(start_method: str, phase: Callable[[Running], None]) -> None:
    """torchrun: test_run 10; launcher_api_test 5."""
    running = start_in(phase, start_method)
    os.kill(running.agent_pid(), signal.SIGKILL)
    finished = running.finish(20)
    assert re.search(r"was killed by SIGKILL(; |\n(.*\n)*)left: +nothing", finished.err), finished.err
    assert finished.err.count("was killed by SIGKILL") == 1, "on the failure page, or where there is none, as an error"
    assert_lost(finished)
    assert_nothing_left(1)


def assert_lost(finished: Finished) -> None:
    assert finished.returncode == NODE_LOST, finished.err
    assert finished.report["exit_code"] == NODE_LOST
    assert finished.report["outcome"] == "failed"
    assert "Traceback" not in finished.err


def test_what_workers_started_goes_with_a_killed_agent_too(start_method: str) -> None:
    running = start("--start-method", start_method, "--nproc-per-node", "2", ESCAPE, "wait")
    running.wait_for(r"ready \(pid", 2)
    os.kill(running.agent_pid(), signal.SIGKILL)
    assert_lost(running.finish(20))
    assert_nothing_left(1)


def test_workers_go_when_launcher_and_agent_are_killed_together(start_method: str) -> None:
    running = start_in(while_running, start_method)
    agent = running.agent_pid()
    for pid in (running.pid, agent):
        os.kill(pid, signal.SIGKILL)
    running.finish()
    assert_nothing_left()


def test_an_agent_that_is_told_to_stop_stops_the_run_and_says_so() -> None:
    running = start_in(while_running, "spawn")
    os.kill(running.agent_pid(), signal.SIGTERM)
    finished = running.finish(20)
    assert finished.returncode == NODE_LOST
    assert "stopped, another process sent SIGTERM to the agent on" in finished.err
    assert finished.out.count("got SIGTERM") == 2


@pytest.mark.usefixtures("slow_import")
def test_a_forkserver_killed_while_it_imports_ends_the_attempt() -> None:
    running = start("--nproc-per-node", "2", EXIT_WITH)
    os.kill(running.forkserver_pid(), signal.SIGKILL)
    finished = running.finish()
    assert_lost(finished)
    assert "the workers could not be started: the forkserver on" in finished.err


@pytest.mark.usefixtures("slow_import")
def test_a_forkserver_killed_while_it_imports_is_started_again_if_restarts_are_left() -> None:
    running = start("--nproc-per-node", "2", "--max-restarts", "1", EXIT_WITH, "*=code:0")
    os.kill(running.forkserver_pid(), signal.SIGKILL)
    finished = running.finish()
    assert finished.returncode == 0, finished.err
    assert [attempt["outcome"] for attempt in finished.report["attempts"]] == ["failed", "succeeded"]


def test_workers_run_on_without_their_forkserver_and_another_serves_the_restart(start_method: str) -> None:
    running = start(
        *("-v", "--start-method", start_method, "--nproc-per-node", "2", "--max-restarts", "1"),
        *(EXIT_WITH, "*=wait,code:0"),
    )
    running.wait_for(r"ready \(pid", 2)
    first = running.forkserver_pid()
    os.kill(first, signal.SIGKILL)
    running.wait_for("the forkserver on .* was killed by SIGKILL; the workers continue")
    os.kill(int(running.wait_for(r"ready \(pid: (\d+)")[0][1]), signal.SIGKILL)
    finished = running.finish()
    assert finished.returncode == 0, finished.err


def test_a_store_killed_before_any_worker_runs_ends_the_attempt() -> None:
    """Else they would try to reach it for as long as torch waits. The moment is short, and not met by every try.

    They end by SIGTERM, also if it comes before they have their own handlers: without SIGKILL after the grace period.
    """
    running = start("--nproc-per-node", "2", "--max-restarts", "3", EXIT_WITH, "*=wait")
    agent, killed = running.agent_pid(), [0]
    while running.process.poll() is None:
        found = (pid for pid in children(agent) if command_line(pid).startswith("ddplaunch store"))
        if (store := next(found, 0)) and store not in killed:
            os.kill(store, signal.SIGKILL)
            killed.append(store)
    finished = running.finish(30)
    assert_lost(finished)
    assert len(killed[1:]) == len(finished.report["attempts"]) == 4
    assert finished.err.count("the workers' store on") >= 4
    exits = [exit_ for attempt in finished.report["attempts"] for exit_ in attempt["exits"]]
    assert {exit_["returncode"] for exit_ in exits} <= {-signal.SIGTERM}


def test_a_killed_store_ends_the_attempt_and_the_next_has_its_own() -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--shutdown-timeout", "1")
    running = start(*options, PRINT_SIGNALS)
    running.wait_for(r"ready \(pid", 2)
    first = running.store_pid()
    os.kill(first, signal.SIGKILL)
    running.wait_for("the workers' store on .* was killed by SIGKILL; restart 1 of 1")
    running.wait_for(r"ready \(pid", 4)
    os.kill(running.store_pid(), signal.SIGKILL)
    finished = running.finish()
    assert_lost(finished)
    assert [exit_["stopped"] for exit_ in finished.report["attempts"][-1]["exits"]] == [True, True]


def test_a_launcher_killed_at_any_moment_leaves_nothing() -> None:
    seed = random.randrange(1 << 32)
    moments = random.Random(seed)
    for _ in range(8):
        ends = ",".join(["code:1"] * 3)
        running = start(*("--nproc-per-node", "2", "--max-restarts", "2", EXIT_WITH, f"0={ends}"))
        time.sleep(moments.uniform(0, 0.6))
        running.signal(signal.SIGKILL)
        running.finish()
        assert_nothing_left(10)


BROKEN_PART = """
import os, sys
if any("agent.main" in word for word in sys.orig_argv):
    from ddplaunch.agent import parts

    class Broken(parts.Part):
        def run_due(self, now):
            if os.path.exists(os.environ["BREAK"]) and self._node.spec.host != "node0":
                self.on_event("a bug") if os.environ["IN"] == "run_due" else self._node.post("a bug")
            return now + 0.05

        def on_event(self, event):
            if event == "a bug":
                raise KeyError(event)
            return False

    load = parts.load
    parts.load = lambda node: (*load(node), Broken(node))
"""


@pytest.mark.parametrize(
    ("nodes", "method"), [(1, "run_due"), (1, "on_event"), pytest.param(2, "on_event", marks=pytest.mark.slow)]
)
def test_a_bug_in_a_part_of_an_agent_ends_the_run_in_order(tmp_path: Path, method: str, nodes: int) -> None:
    """Workers get SIGTERM, and time; the launcher says what has happened, and where."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN_PART)
    trigger = tmp_path / "break"
    options = ("--nproc-per-node", "2") if nodes == 1 else ("--dry-run", "--nnodes", "2", "--nproc-per-node", "1")
    env = {"PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}", "BREAK": str(trigger), "IN": method}
    running = start(*options, PRINT_SIGNALS, "0.2", env=env)
    running.wait_for(r"ready \(pid", 2)
    trigger.touch()
    finished = running.finish()
    assert finished.returncode == INTERNAL, finished.err
    assert finished.out.count("got SIGTERM") == finished.out.count("bye") == 2
    assert finished.err.count("a bug in ddplaunch's agent on ") == 1
    assert finished.err.count("KeyError: 'a bug'") == 1
    assert finished.err.count("Traceback (most recent call last)") == 1
    assert_nothing_left()
