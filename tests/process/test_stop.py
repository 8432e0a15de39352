"""Asked to stop, in whatever phase and however often, a run ends in time, with the documented code, told once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.config import LaunchConfig, WorkerConfig
from ddplaunch.launcher import setup
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import StopWorkers
from ddplaunch.system.processes import ignores
from ddplaunch.transport import agent_process
from tests.support.processes import catches, command_line, wait_until
from tests.support.runs import PROGRAMS, SLOW_IMPORT, Finished, Running, environment, start
from tests.support.screen import Screen
from tests.support.terminal import CTRL_BACKSLASH, CTRL_C, terminal

STOPS = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP")
PRINT_SIGNALS = PROGRAMS / "print_signals.py"
WRITE = PROGRAMS / "write.py"
IGNORE = PROGRAMS / "ignore_sigterm.py"


def number(name: str) -> int:
    return int(signal.Signals[name])


def assert_stopped(finished: Finished, name: str) -> None:
    """Ended by the signal ``name``, as documented, and nothing of ours looks like a bug."""
    assert finished.returncode == 128 + number(name), finished.err
    assert "Traceback" not in finished.err
    assert finished.report["signal"] == name
    assert finished.report["outcome"] == "stopped"
    assert "stopped; every process of this run has ended" in finished.err


@pytest.mark.parametrize(
    ("start_method", "name"),
    [*(("forkserver", name) for name in STOPS), ("spawn", "SIGINT")],
)
def test_each_stop_signal_reaches_every_worker_once_and_ends_the_run(start_method: str, name: str) -> None:
    """torchrun: launcher_api_test 4, 6; agent_api_test 11; multiprocessing_api_test 14, 15."""
    running = start("--start-method", start_method, "--nproc-per-node", "2", PRINT_SIGNALS, "0.2")
    running.wait_for(r"ready \(pid", 2)
    running.signal(number(name))
    finished = running.finish()
    assert_stopped(finished, name)
    assert sorted(re.findall(r"^\[\S+:\d\] (?:got.*|bye)$", finished.out, re.MULTILINE)) == sorted(
        f"[{host_of(finished)}:{rank}] {text}" for rank in (0, 1) for text in (f"got {name}", "bye")
    )


def host_of(finished: Finished) -> str:
    match = re.search(r"workers? on (\S+),", finished.err)
    assert match
    return match[1]


def when_launcher_listens(running: Running) -> None:
    wait_until(lambda: catches(running.pid, signal.SIGTERM))


def when_torch_is_imported(running: Running) -> None:
    running.forkserver_pid()


def when_workers_start(running: Running) -> None:
    running.wait_for(r"(ready|child) \(pid")


def when_workers_run(running: Running) -> None:
    running.wait_for(r"ready \(pid", 2)


PHASES = (when_launcher_listens, when_torch_is_imported, when_workers_start, when_workers_run)


@pytest.mark.parametrize(
    ("start_method", "phase"),
    [
        *(("forkserver", phase) for phase in PHASES if phase is not when_workers_run),
        ("spawn", when_torch_is_imported),
        ("spawn", when_workers_start),
    ],
)
def test_a_stop_ends_the_run_in_every_phase(start_method: str, phase: Callable[[Running], None]) -> None:
    """While workers run: the test of each stop signal."""
    env = SLOW_IMPORT if phase is when_torch_is_imported else None
    running = start("--start-method", start_method, "--nproc-per-node", "2", PRINT_SIGNALS, env=env)
    phase(running)
    running.signal(signal.SIGTERM)
    finished = running.finish()
    assert finished.returncode == 143, finished.err
    assert "Traceback" not in finished.err + finished.out


@pytest.mark.parametrize(
    ("phase", "times"), [*((phase, 3) for phase in PHASES if phase is not when_workers_start), (when_workers_run, 2)]
)
def test_several_stops_end_the_run_in_every_phase(phase: Callable[[Running], None], times: int) -> None:
    running = start("--nproc-per-node", "2", "--shutdown-timeout", "600", IGNORE)
    phase(running)
    for count in range(1, times + 1):
        running.signal_again(signal.SIGTERM)
        # Before any worker runs, the first may be the last.
        with contextlib.suppress(TimeoutError):
            running.wait_for("stopping the workers", count)
    finished = running.finish(30)
    assert finished.returncode == 143, finished.err
    assert "Traceback" not in finished.err + finished.out


def test_workers_that_ignore_the_signal_and_their_children_are_killed_after_the_grace() -> None:
    """torchrun: shutdown_timeout_test 3."""
    options = ("--nproc-per-node", "2", "--shutdown-timeout", "1")
    running = start(*options, IGNORE)
    running.wait_for(r"(ready|child) \(pid", 4)
    asked_s = time.monotonic()
    running.signal(signal.SIGTERM)
    finished = running.finish()
    assert 1 <= time.monotonic() - asked_s < 10
    assert_stopped(finished, "SIGTERM")
    assert [exit_["returncode"] for exit_ in finished.report["attempts"][0]["exits"]] == [-9, -9]


def test_a_worker_that_ignores_ctrl_c_is_stopped_by_sigterm_at_once(tmp_path: Path) -> None:
    script = tmp_path / "ignore.py"
    script.write_text("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print('ready'); signal.pause()")
    running = start("--nproc-per-node", "2", "--shutdown-timeout", "600", script)
    running.wait_for("ready", 2)
    running.signal(signal.SIGINT)
    finished = running.finish(20)
    assert_stopped(finished, "SIGINT")
    assert [exit_["returncode"] for exit_ in finished.report["attempts"][0]["exits"]] == [-15, -15]


def test_repeated_signals_reach_a_worker_that_tidies_up_only_once() -> None:
    running = start("--nproc-per-node", "2", PRINT_SIGNALS, "60")
    running.wait_for(r"ready \(pid", 2)
    running.signal(signal.SIGINT)
    running.wait_for("got SIGINT", 2)
    running.signal_again(signal.SIGINT)
    finished = running.finish(20)
    assert_stopped(finished, "SIGINT")
    assert finished.out.count("got SIGINT") == 2
    assert finished.out.count("got SIGTERM") == 2, "the second signal asks with SIGTERM"


def test_signals_of_one_moment_are_one() -> None:
    """A scheduler may send several. The launcher is frozen meanwhile, so that it reads them together."""
    running = start("--nproc-per-node", "2", PRINT_SIGNALS, "0.2")
    running.wait_for(r"ready \(pid", 2)
    for signum in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT):
        running.signal(signum)
    finished = running.finish()
    assert finished.returncode in [128 + number(name) for name in STOPS], finished.err
    assert re.findall("stopping the workers.*", finished.err) == [
        "stopping the workers, SIGKILL in 30 s; a second signal: SIGKILL in 5 s"
    ]
    assert finished.out.count("bye") == 2


def test_signals_to_every_process_of_a_run_leave_the_workers_their_store() -> None:
    """They may need it to save. Some configurations of SLURM, and systemd, signal each process."""
    running = start("--nproc-per-node", "2", PRINT_SIGNALS, "0.2")
    running.wait_for(r"ready \(pid", 2)
    store = running.store_pid()
    wait_until(lambda: all(ignores(store, number(name)) for name in (*STOPS, "SIGUSR1", "SIGUSR2")))
    running.signal(signal.SIGTERM)
    assert_stopped(running.finish(), "SIGTERM")


def test_the_grace_holds_when_another_rank_has_failed_too() -> None:
    script = PROGRAMS / "tidy_up.py"
    running = start("--nproc-per-node", "2", "--shutdown-timeout", "20", script, "1.5")
    finished = running.finish()
    assert finished.returncode == 4
    assert "tidied up" in finished.out
    running = start("--nproc-per-node", "2", "--shutdown-timeout", "0.5", script, "60")
    finished = running.finish(20)
    assert finished.returncode == 4
    assert "tidied up" not in finished.out


def test_a_worker_that_is_stopped_is_continued_so_that_it_hears_the_signal() -> None:
    running = start("--nproc-per-node", "2", PRINT_SIGNALS)
    pid = int(running.wait_for(r":0\] ready \(pid: (\d+)")[0][1])
    running.wait_for(r"ready \(pid", 2)
    os.kill(pid, signal.SIGSTOP)
    running.signal(signal.SIGTERM)
    finished = running.finish(20)
    assert_stopped(finished, "SIGTERM")
    assert finished.out.count("got SIGTERM") == 2


def test_stopped_workers_that_ignore_the_signal_are_killed_after_the_grace() -> None:
    running = start("--nproc-per-node", "1", "--shutdown-timeout", "0.5", IGNORE, "stop")
    running.wait_for(r"(ready|child) \(pid", 2)
    running.signal(signal.SIGTERM)
    assert_stopped(running.finish(20), "SIGTERM")


def test_user_signals_are_passed_on_once_and_stop_nothing() -> None:
    """torchrun: multiprocessing_api_test 17."""
    running = start("--nproc-per-node", "2", PRINT_SIGNALS)
    running.wait_for(r"ready \(pid", 2)
    for name in ("SIGUSR1", "SIGUSR2", "SIGUSR1"):
        running.signal(number(name))
        running.wait_for(f"got {name}", 2)
    wait_until(lambda: sum("got SIGUSR1" in line for line in running.lines) == 4)
    running.signal(signal.SIGTERM)
    finished = running.finish()
    assert_stopped(finished, "SIGTERM")
    assert finished.out.count("got SIGUSR1") == 4
    assert finished.out.count("got SIGUSR2") == 2


def test_a_user_signal_that_is_named_a_stop_signal_stops() -> None:
    """torchrun: launcher_api_test 6; multiprocessing_api_test 15."""
    options = ("--nproc-per-node", "2", "--signals-to-handle", "SIGUSR1,SIGTERM")
    running = start(*options, PROGRAMS / "exit_with.py")
    running.wait_for(r"ready \(pid", 2)
    running.signal(signal.SIGUSR1)
    assert_stopped(running.finish(), "SIGUSR1")


SAVE = """
import signal, subprocess, sys
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
def save(*_):
    try:
        child.wait(0.5)
    except subprocess.TimeoutExpired:
        print("saved with its child", flush=True)
    sys.exit()
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
signal.pause()
"""


def test_a_stop_by_a_user_signal_leaves_children_to_the_worker(tmp_path: Path) -> None:
    """Those that load data would die of it, and it with them before it has saved."""
    (script := tmp_path / "save.py").write_text(SAVE)
    running = start("--nproc-per-node", "1", "--signals-to-handle", "SIGUSR1", script)
    running.wait_for("ready")
    running.signal(signal.SIGUSR1)
    finished = running.finish()
    assert_stopped(finished, "SIGUSR1")
    assert "saved with its child" in finished.out


def test_hang_up_is_ignored_under_nohup() -> None:
    running = start(
        *("--nproc-per-node", "2", PRINT_SIGNALS),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    running.wait_for(r"ready \(pid", 2)
    running.signal(signal.SIGHUP)
    running.signal(signal.SIGUSR1)
    running.wait_for("got SIGUSR1", 2)
    running.signal(signal.SIGTERM)
    finished = running.finish()
    assert_stopped(finished, "SIGTERM")
    assert "got SIGHUP" not in finished.out


@pytest.mark.parametrize(("keys", "name", "workers"), [(CTRL_C, "SIGINT", 1), (CTRL_BACKSLASH, "SIGQUIT", 2)])
def test_the_keys_that_stop_at_a_terminal_reach_every_worker_once(keys: bytes, name: str, workers: int) -> None:
    with terminal() as screen:
        running = screen.start("--nproc-per-node", str(workers), PRINT_SIGNALS, "0.2")
        running.wait_for(r"ready \(pid", workers)
        screen.type(keys)
        assert running.finish().returncode == 128 + number(name)
        assert sum(f"got {name}" in line for line in running.lines) == workers


JOB_CONTROL = ("setsid", "--ctty", "bash", "--norc", "-ic", '"$@"; echo in the shell; read; fg', "bash")


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ("1", b"the worker runs on and writes to this terminal; fg resumes the launcher"),
        ("2", b"the workers run on; fg shows their output, `ddplaunch --leave job` lets you close this terminal"),
    ],
)
def test_ctrl_z_suspends_the_launcher_only_and_fg_shows_the_rest(workers: str, message: bytes, tmp_path: Path) -> None:
    end, screen = tmp_path / "end", Screen()
    options = ("--nproc-per-node", workers, "--log-dir", tmp_path, "--rdzv-id", "job")
    running = screen.start(*options, WRITE, r"out:before\n", f"until:{end}", r"out:after\n", under=JOB_CONTROL)
    screen.wait_for(b"before\n")
    screen.type(b"\x1a")
    screen.wait_for(b"ddplaunch: suspended: " + message + b"\n")
    screen.wait_for(b"in the shell\n")
    end.touch()
    logs = (tmp_path / "job/attempt_0").glob
    logged = ["before\nafter\n"] * int(workers)
    wait_until(lambda: [log.read_text() for log in logs("*/stdout.log")] == logged)
    if workers == "1":
        screen.wait_for(b"\nafter\n")
    else:
        assert b"after" not in screen.shown
    screen.type(b"\n")
    assert running.finish().returncode == 0
    assert screen.close().count(b"after\n") == int(workers)


def test_ctrl_z_without_a_shell_that_could_continue_the_launcher_does_nothing(tmp_path: Path) -> None:
    with terminal() as screen:
        running = screen.start(*("--nproc-per-node", "2"), WRITE, r"out:a\n", "ask:")
        running.wait_for("a$", 2)
        screen.type(b"\x1a\n\n")
        assert running.finish().returncode == 0
        assert not any("suspended" in line for line in running.lines)


def test_closing_the_terminal_ends_the_run() -> None:
    with terminal() as screen:
        running = screen.start("--nproc-per-node", "2", PRINT_SIGNALS)
        running.wait_for(r"ready \(pid", 2)
        screen.close()
        assert running.finish().returncode == 129


def test_an_agent_that_is_stopped_is_continued_so_that_it_hears_of_the_stop() -> None:
    running = start("--nproc-per-node", "2", PRINT_SIGNALS)
    running.wait_for(r"ready \(pid", 2)
    os.kill(running.agent_pid(), signal.SIGSTOP)
    running.signal(signal.SIGINT)
    assert_stopped(running.finish(20), "SIGINT")


STANDS_STILL = """
import pathlib, signal, sys
got = pathlib.Path(sys.argv[1])
def note(number, _):
    with got.open("a") as file:
        file.write(signal.Signals(number).name + " ")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
got.touch()
while True:
    signal.pause()
"""


def test_two_requests_that_an_agent_reads_at_once_are_two_for_a_job_that_was_quiet(tmp_path: Path) -> None:
    """The first waits until it has been seen what the workers do; the second waits for nothing."""
    got, limit_s = tmp_path / "got", 1.0
    program = ("-S", "-c", STANDS_STILL, str(got))
    workers = WorkerConfig(nproc_per_node=1)
    config = LaunchConfig(script=sys.executable, script_args=program, entry="program", workers=workers)
    spec = setup.agent_spec(config, "a-run", 0, "here", node_dir=None)
    spec = replace(spec, timeouts=replace(spec.timeouts, hang_report_s=limit_s))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with subprocess.Popen(agent_process.COMMAND, env=environment(), **pipes) as agent:
        assert agent.stdin
        agent.stdin.write(wire.encode(spec))
        agent.stdin.flush()
        wait_until(got.exists)
        quiet_since = time.monotonic()
        wait_until(lambda: time.monotonic() > quiet_since + 2 * limit_s)
        orders = (StopWorkers(signal.SIGINT, 30.0), StopWorkers(signal.SIGTERM, 1.0))
        agent.stdin.write(b"".join(map(wire.encode, orders)))
        agent.stdin.flush()
        assert agent.wait(20) == 0
    # A handler may be interrupted by the next one before it has written.
    assert sorted(got.read_text().split()) == ["SIGINT", "SIGTERM"]


def test_a_stop_is_heard_while_an_agent_that_is_stopped_does_not_read_its_orders() -> None:
    running = start(PRINT_SIGNALS, *["x" * 100_000] * 4)
    # Stopped before its exec, it would hold up the vfork of its parent, which no launcher could help.
    wait_until(lambda: "agent.main" in command_line(running.agent_pid()))
    os.kill(running.agent_pid(), signal.SIGSTOP)
    wait_until(lambda: catches(running.pid, signal.SIGTERM))
    running.signal(signal.SIGTERM)
    assert running.finish(20).returncode == 143


def test_a_signal_while_the_launcher_exits_does_not_change_its_exit_code() -> None:
    """`srun --kill-on-bad-exit` sends it as soon as the launcher of another node has exited."""
    running = start("--nproc-per-node", "1", PROGRAMS / "exit_with.py", "0=code:7")
    running.wait_for("every process of this run has ended")
    while running.process.poll() is None:
        running.signal(signal.SIGTERM)
    assert running.finish().returncode == 7


def test_a_signal_that_is_not_handled_leaves_the_agent_its_time_to_stop_the_workers() -> None:
    running = start("--signals-to-handle", "SIGTERM", "--shutdown-timeout", "6", "--nproc-per-node", "1", IGNORE)
    running.wait_for(r"(ready|child) \(pid", 2)
    running.signal(signal.SIGINT)
    finished = running.finish(40)
    assert finished.returncode == 130
    assert "Traceback" not in finished.err
