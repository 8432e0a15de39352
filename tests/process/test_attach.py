"""--attach and --wait: the console of a run in another terminal, its exit code, and that no viewer disturbs the run."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import termios
import time
from pathlib import Path

import pytest

from ddplaunch.launcher.display import console_log
from tests.support.detached import JOB, UNTIL, folder_of, job, launcher_of, report_of, started, wait_for_log
from tests.support.processes import is_alive, wait_until
from tests.support.runs import command, run, start
from tests.support.screen import CTRL_C, Screen
from tests.support.terminal import terminal

USAGE, NODE_NOT_READY, NO_REPORT, LEFT = 2, 82, 89, 130


def test_viewers_show_what_was_and_what_follows_and_exit_with_the_runs_code(go: Path, screen: Screen) -> None:
    run_id = started(go, "--nproc-per-node", "2")
    on_terminal = screen.start("--attach", run_id, env={"TERM": "xterm"})
    in_pipe = start("--attach", run_id)
    screen.wait_for(b"begins")
    in_pipe.wait_for("begins", 2)
    waiting = start("--wait", run_id[:-1])
    go.touch()
    assert [each.finish().returncode for each in (on_terminal, waiting)] == [7, 7]
    finished = in_pipe.finish()
    assert finished.returncode == 7
    assert finished.out == (folder_of(run_id) / "console.log").read_text()
    assert finished.err == f"ddplaunch: run {run_id}; Ctrl-C leaves it\n"
    shown = screen.close()
    assert b"\x1b[36m[" in shown
    assert b":0] \x1b[0mbegins" in shown, "the prefix has the colour of its rank"
    assert b"ddplaunch: the job failed" in shown


def test_an_ended_run_is_shown_with_its_code(go: Path) -> None:
    go.touch()
    run("--detach", *job(go))
    [run_id] = [path.name for path in folder_of("").iterdir() if path.is_dir()]
    report_of(run_id)
    assert run("--wait", run_id).returncode == 7
    ended = run("--attach", run_id[-6:])
    assert ended.returncode == 7
    assert ended.err.splitlines() == [
        f"ddplaunch: run {run_id}; it has ended",
        "ddplaunch: the run has ended with exit code 7",
    ]
    assert "every process of this run has ended" in ended.out
    assert len(ended.out.splitlines()) <= 24


def test_ctrl_c_leaves_and_says_how_to_come_back(go: Path, screen: Screen) -> None:
    run_id = started(go)
    viewer = screen.start("--attach", run_id)
    screen.wait_for(b"begins")
    screen.type(CTRL_C)
    assert viewer.finish().returncode == LEFT
    shown = screen.close().decode()
    assert f"left; the run goes on. Back: ddplaunch --attach {run_id}; end it: ddplaunch --kill {run_id}" in shown
    assert is_alive(launcher_of(run_id))


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 128 + signal.SIGTERM), (CTRL_C, LEFT)])
def test_ctrl_c_twice_asks_whether_to_stop_the_run(answer: bytes, code: int, go: Path, screen: Screen) -> None:
    run_id = started(go)
    viewer = screen.start("--attach", run_id)
    screen.wait_for(b"begins")
    screen.type(CTRL_C)
    screen.wait_for(b"left; ")
    screen.type(CTRL_C)
    screen.wait_for(f"stop the run {run_id}? [y/N]".encode())
    assert is_alive(launcher_of(run_id))
    screen.type(answer)
    assert viewer.finish().returncode == code
    if code == LEFT:
        assert is_alive(launcher_of(run_id))
    else:
        assert b"SIGTERM: stopping the workers" in screen.close()
        assert report_of(run_id)["signal"] == "SIGTERM"


def test_viewers_that_are_killed_or_stopped_at_any_moment_harm_nothing(go: Path) -> None:
    run_id = started(go)
    stopped = start("--attach", run_id)
    stopped.wait_for("begins")
    stopped.signal(signal.SIGSTOP)
    killed = [start("--attach", run_id) for _ in range(6)]
    for number, viewer in enumerate(killed):
        time.sleep(0.05 * number)  # Each at another moment of its start.
        viewer.signal(signal.SIGKILL)
        assert viewer.finish().returncode == -signal.SIGKILL
    assert is_alive(launcher_of(run_id))
    go.touch()
    assert report_of(run_id)["exit_code"] == 7
    wait_until(lambda: run("--wait", run_id).returncode == 7)
    stopped.signal(signal.SIGCONT)
    finished = stopped.finish()
    assert finished.returncode == 7
    assert "ends" in finished.out


def test_a_viewer_reads_on_in_the_next_file(go: Path, tmp_path: Path) -> None:
    """A stopped viewer, too, gets every line in order, as long as the files are there."""
    program = 'echo begins; while [ ! -e "$0" ]; do sleep 0.05; done; seq 1 300000; echo ends'
    code = (
        "import sys; from ddplaunch.launcher.display import console_log; from ddplaunch.cli.main import main; "
        "console_log.MAX_BYTES = 1 << 20; main(sys.argv[1:])"
    )
    from tests.support.runs import python

    log_dir = str(tmp_path / "runs")
    detached = python("-c", code, "--detach", "--log-dir", log_dir, "--no-python", "sh", "-c", program, str(go))
    run_id = detached.out.strip()
    viewer = start("--attach", run_id, "--log-dir", log_dir)
    viewer.wait_for("begins")
    viewer.signal(signal.SIGSTOP)
    go.touch()
    folder = tmp_path / "runs" / run_id
    wait_until(lambda: (folder / console_log.EARLIER).exists(), 30)
    viewer.signal(signal.SIGCONT)
    finished = viewer.finish()
    assert finished.returncode == 0
    lines = [line for line in finished.out.splitlines() if line.isdigit()]
    if "lines not shown" not in finished.err + finished.out:
        assert lines == [str(number) for number in range(1, 300001)]
    else:
        assert lines == sorted(set(lines), key=int)
    assert "ends" in finished.out


def test_a_run_in_the_foreground_can_be_attached_to_also_in_another_folder(go: Path, tmp_path: Path) -> None:
    running = start("--rdzv-id", JOB, "--log-dir", tmp_path / "else", *job(go, "--nproc-per-node", "2"))
    running.wait_for("begins", 2)
    viewer = start("--attach", JOB)
    viewer.wait_for("begins", 2)
    assert run("--wait", "no-such").returncode == USAGE
    go.touch()
    assert viewer.finish().returncode == running.finish().returncode == 7


def test_output_that_is_on_the_terminal_of_the_run_is_seen_too(go: Path) -> None:
    with terminal() as opened:
        running = opened.start("--rdzv-id", JOB, *job(go))
        running.wait_for("begins")
        viewer = start("--attach", JOB)
        viewer.wait_for("begins")
        go.touch()
        assert viewer.finish().returncode == running.finish().returncode == 7


def test_the_code_of_a_run_is_known_after_its_folder_was_moved(go: Path, tmp_path: Path) -> None:
    run_id = started(go)
    viewer = start("--attach", run_id)
    viewer.wait_for("begins")
    moved = folder_of(run_id).rename(tmp_path / "mine")
    go.touch()
    assert viewer.finish().returncode == 7
    assert json.loads((moved / "report.json").read_text())["run_dir"] == str(moved)


def test_a_part_of_the_run_cannot_wait_for_it(go: Path) -> None:
    words = " ".join(command())
    program = f"{words} --attach $TORCHELASTIC_RUN_ID; echo $?; {words} --wait $TORCHELASTIC_RUN_ID; echo $?"
    ended = run("-t", "3", "--no-python", "sh", "-c", program)
    assert ended.out.split() == [str(USAGE)] * 2
    assert ended.err.count("this command is a part of that run") == 2


def test_a_suspended_launcher_is_named(go: Path) -> None:
    run_id = started(go)
    launcher = launcher_of(run_id)
    os.kill(launcher, signal.SIGSTOP)
    viewer = start("--attach", run_id)
    viewer.wait_for(f"`kill -CONT {launcher}` continues it")
    os.kill(launcher, signal.SIGCONT)
    go.touch()
    assert viewer.finish().returncode == 7


def test_the_code_of_a_killed_run_is_unknown(go: Path) -> None:
    run_id = started(go)
    viewer, waiting = start("--attach", run_id), start("--wait", run_id)
    viewer.wait_for("begins")
    os.kill(launcher_of(run_id), signal.SIGKILL)
    for each in (viewer, waiting):
        finished = each.finish()
        assert finished.returncode == NO_REPORT
        assert "the exit code is not known: its launcher was killed before it wrote a report" in finished.err
    again = run("--wait", run_id)
    assert again.returncode == NO_REPORT


@pytest.mark.parametrize("option", ["--attach", "--wait"])
def test_what_cannot_be_shown_is_an_error(option: str, go: Path) -> None:
    unknown = run(option, JOB)
    assert (unknown.returncode, unknown.out) == (USAGE, "")
    assert f"{option} {JOB}: no run of yours with this id in {folder_of('')}" in unknown.err
    running = start("--log-dir", "/dev/null", "--rdzv-id", "job8", "--no-python", "sh", "-c", UNTIL, str(go))
    running.wait_for("begins")
    without = run(option, "job8")
    assert (without.returncode, without.out) == (NODE_NOT_READY, "")
    assert "this run keeps no files (--log-dir /dev/null)" in without.err
    go.touch()
    running.finish()


@pytest.mark.parametrize("words", [("--attach",), ("-f", "--logs")])
def test_a_pipe_that_is_closed_ends_the_viewer_only(words: tuple[str, ...], go: Path) -> None:
    """Also while the run says nothing: over SSH without a terminal, the viewer would stay on the machine."""
    run_id = started(go)
    reader, writer = os.pipe()
    viewer = start(*words, run_id, stdout=writer)
    os.close(writer)
    with open(reader) as pipe:
        assert any("begins" in line for line in pipe)
    assert viewer.finish().returncode == 128 + signal.SIGPIPE
    assert is_alive(launcher_of(run_id))


def test_a_viewer_waits_where_a_pipe_that_does_not_block_is_full(go: Path) -> None:
    program = 'seq 1 100000; touch "$0"'
    started = run("--detach", "--no-python", "sh", "-c", program, str(go))
    wait_until(go.exists, 30)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    printing = start("--logs", started.out.strip(), stdout=writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        wait_until(lambda: waiting_bytes(reader) > PIPE_BYTES * 3 // 4, 30)
        assert len(pipe.read().splitlines()) == 100_001, "and a title"
    assert printing.finish().returncode == 0


PIPE_BYTES = 1 << 16


def waiting_bytes(pipe: int) -> int:
    return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0])


def test_a_run_that_has_just_started_can_be_attached_to(go: Path) -> None:
    running = start("--rdzv-id", JOB, *job(go, "--nproc-per-node", "2"))
    wait_until((folder_of(JOB) / ".ddplaunch-run").exists, 30)
    viewer = start("--attach", JOB)
    viewer.wait_for("begins", 2)
    go.touch()
    assert viewer.finish().returncode == running.finish().returncode == 7


JOB_CONTROL = ("setsid", "--ctty", "bash", "--norc", "-ic", '"$@"; echo in the shell; read', "bash")


@pytest.mark.slow
def test_a_run_in_the_foreground_leaves_its_terminal(go: Path, screen: Screen) -> None:
    shell = screen.start("--rdzv-id", JOB, *job(go, "--nproc-per-node", "2"), under=JOB_CONTROL)
    screen.wait_for(b"begins")
    wait_for_log(JOB, "begins")
    screen.type(b"\x1a")
    screen.wait_for(f"`ddplaunch --leave {JOB}` lets you close this terminal".encode())
    screen.wait_for(b"in the shell")
    launcher = json.loads((folder_of(JOB) / "run.json").read_text())["pid"]
    left = run("--leave", JOB)
    assert (left.returncode, left.out) == (0, ""), left.err
    assert left.err == f"ddplaunch: run {JOB} goes on without its terminal; to come back: ddplaunch --attach {JOB}\n"
    screen.wait_for(b"ddplaunch: the run goes on without this terminal, which can be closed")
    assert [os.readlink(f"/proc/{launcher}/fd/{fd}") for fd in (0, 1, 2)] == [os.devnull] * 3
    os.kill(shell.pid, signal.SIGKILL)
    shell.finish()
    screen.close()
    os.kill(launcher, signal.SIGHUP)
    viewer = start("--attach", JOB)
    viewer.wait_for("begins", 2)
    assert is_alive(launcher)
    go.touch()
    assert viewer.finish().returncode == 7
    assert report_of(JOB)["exit_code"] == 7


def test_a_lone_worker_keeps_its_terminal(go: Path) -> None:
    with terminal() as opened:
        running = opened.start("--rdzv-id", JOB, *job(go))
        running.wait_for("begins")
        refused = run("--leave", JOB)
        assert refused.returncode == NODE_NOT_READY
        assert "its only worker writes to the terminal itself (not with -t 3)" in refused.err
        go.touch()
        assert running.finish().returncode == 7
    ended = run("--leave", JOB)
    assert ended.returncode == USAGE
    assert "its launcher has ended" in ended.err
