"""What cannot work is told in a message that says what, where and what to do; what others wrote breaks nothing."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cgroups import inside, limited
from tests.support.processes import command_line
from tests.support.runs import PROGRAMS, Finished, command, environment, run, start

EXIT_WITH = PROGRAMS / "exit_with.py"

USAGE = 2
NOT_READY = 82
RENDEZVOUS = 83
NODE_LOST = 84

BY_NOBODY = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--")
"""Root without the right to read everything: what a file's permissions say holds for it too."""


def assert_refused(finished: Finished, code: int, *texts: str) -> None:
    """Ended before any worker ran, with one message and one hint."""
    assert finished.returncode == code, finished.err
    for text in texts:
        assert re.search(text, finished.err), finished.err
    assert finished.err.count("ddplaunch: error: ") == 1
    assert "\n  hint: " in finished.err
    assert "Traceback" not in finished.err
    assert "ready" not in finished.out


# The script.


def test_a_script_that_is_not_there_is_told_with_where_it_was_looked_for(tmp_path: Path) -> None:
    """torchrun: agent_api_test 5."""
    finished = run("nope.py", cwd=tmp_path)
    assert_refused(finished, NOT_READY, "nope.py: no such file on ", f"looked for in {tmp_path}")


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("trian.py", "Did you mean train.py?"),
        ("sub/trani.py", "Did you mean sub/train.py?"),
        ("python", "Leave out python: ddplaunch runs the script"),
        ("python3.11", "Leave out python3.11: "),
        ("sbu/train.py", "It is looked for in "),
    ],
)
def test_what_was_probably_meant_in_place_of_a_script_is_said(typed: str, hint: str, tmp_path: Path) -> None:
    for path in (tmp_path / "train.py", tmp_path / "sub/train.py"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    finished = run(typed, "train.py", cwd=tmp_path)
    assert_refused(finished, NOT_READY, f"{typed}: no such file on ", f"hint: {hint}")


def test_a_folder_is_not_a_script(tmp_path: Path) -> None:
    assert_refused(run(tmp_path), NOT_READY, "is a folder on .*\n  hint: Give the script itself")


def test_a_script_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    script = tmp_path / "secret.py"
    script.write_text("print('ready')")
    script.chmod(0)
    finished = run(script, under=BY_NOBODY if os.getuid() == 0 else ())
    assert_refused(finished, NOT_READY, "secret.py: Permission denied on .*\n  hint: Check the file's permissions")


def test_a_script_that_is_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.py")
    assert_refused(run(tmp_path / "fifo.py"), NOT_READY, "fifo.py: is not a regular file on ")


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("no-such-program", "no-such-program: no such program on .*, or it is not executable"),
        (
            "./not_executable",
            "./not_executable: no such program on .*, or it is not executable\n  hint: .*x permission",
        ),
    ],
)
def test_a_program_that_cannot_be_run_is_told(tmp_path: Path, program: str, text: str) -> None:
    """torchrun: multiprocessing_api_test 9."""
    (tmp_path / "not_executable").write_text("#!/bin/sh\n")
    assert_refused(run("--no-python", program, cwd=tmp_path), NOT_READY, text)


def test_a_program_the_kernel_cannot_start_is_told_by_its_worker(tmp_path: Path) -> None:
    (tmp_path / "prog").write_bytes(b"\x7fELF, but not really")
    (tmp_path / "prog").chmod(0o755)
    finished = run("--no-python", "--nproc-per-node", "2", "./prog", cwd=tmp_path)
    assert finished.returncode == 126
    assert "cannot run ./prog: Exec format error" in finished.err


def test_an_interpreter_that_is_not_there_is_told() -> None:
    finished = run(EXIT_WITH, env={"PYTHON_EXEC": "/no/such/python"})
    assert_refused(finished, NOT_READY, "/no/such/python: no such interpreter on .*\n  hint: Check PYTHON_EXEC")


def test_a_module_to_preload_that_is_not_there_is_told() -> None:
    finished = run("--preload", "no_such_module_at_all", EXIT_WITH)
    assert finished.returncode == NOT_READY
    assert re.search(r"error: \S+: no_such_module_at_all cannot be imported", finished.err)
    assert "hint: Remove it from --preload, or install it." in finished.err
    assert "ddplaunch/" not in finished.err.replace("state/ddplaunch/", "")


def test_without_paramiko_only_hosts_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['paramiko'] = None")
    env = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    for arguments in (("--hosts", "node1", EXIT_WITH), ("--ps", "--hosts", "node1")):
        finished = run(*arguments, env=env)
        assert finished.returncode == NOT_READY
        assert "the Python package paramiko, which is not installed\n  hint: Run `" in finished.err
        assert "Traceback" not in finished.err
    assert run("--ps", env=env).returncode == 0


# Numbers.


@pytest.mark.parametrize("number", ["1000000", "gpu"])
def test_a_number_of_workers_that_cannot_be_is_refused(number: str) -> None:
    if number == "gpu" and os.path.exists("/dev/nvidiactl"):
        pytest.skip("there are GPUs here")
    finished = run("--nproc-per-node", number, EXIT_WITH)
    assert finished.returncode == USAGE
    assert "Traceback" not in finished.err
    assert "ready" not in finished.out


# Addresses.


def test_a_port_that_is_taken_is_told() -> None:
    """torchrun: utils 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finished = run("--master-addr", "127.0.0.1", "--master-port", str(port), EXIT_WITH)
    assert_refused(finished, RENDEZVOUS, f"cannot listen at 127.0.0.1:{port}: Address already in use", "free port")


@pytest.mark.parametrize("address", ["192.0.2.1", "a..b"])
def test_an_address_that_is_not_this_machines_is_told(address: str) -> None:
    finished = run("--master-addr", address, "--master-port", "0", EXIT_WITH)
    assert_refused(finished, RENDEZVOUS, f"cannot listen at {re.escape(address)}:0: ")


def test_two_runs_at_once_with_the_same_options_do_not_touch_each_other() -> None:
    options = ("--nproc-per-node", "2", "--rdzv-id", "twin")
    runs = [start(*options, PROGRAMS / "print_signals.py") for _ in range(2)]
    for running in runs:
        running.wait_for(r"ready \(pid", 2)
    # The sweep after a lost agent looks for the run's mark: the other run must have another.
    os.kill(runs[0].agent_pid(), signal.SIGKILL)
    lost = runs[0].finish()
    assert lost.returncode == NODE_LOST
    runs[1].signal(signal.SIGTERM)
    stopped = runs[1].finish()
    assert (stopped.returncode, stopped.out.count("got SIGTERM"), stopped.out.count("bye")) == (143, 2, 2)
    assert {lost.run_dir.name, stopped.run_dir.name} == {"twin", "twin.2"}


# Error files.


ERROR_FILES = {
    "missing": None,
    "empty": "cannot be parsed",
    "truncated": "cannot be parsed",
    "huge": r"1073741824 bytes, which is too many",
    "not JSON": "cannot be parsed",
    "not an object": "cannot be parsed",
    "another schema": r"a.*None",
    "deep": "cannot be parsed",
    "invalid UTF-8": "cannot be parsed",
    "symlink": None,
    "FIFO": "not a regular file",
    "directory": "not a regular file",
    "control characters": "wiped",  # The last, of which the page tells too.
}
"""What a worker leaves in place of one that is right, and what is told of it; None: the exit code counts."""


def test_bad_error_files_are_told_of_and_break_nothing() -> None:
    """torchrun: errors_api_test 1."""
    options = ("--max-restarts", str(len(ERROR_FILES) - 1))
    finished = run(*options, PROGRAMS / "leave_error_file.py", ",".join(ERROR_FILES))
    assert finished.returncode == 3, finished.err
    for attempt, (kind, message) in zip(finished.report["attempts"], ERROR_FILES.items(), strict=True):
        (exit_,) = attempt["exits"]
        error = exit_["error"]
        assert exit_["returncode"] == 3
        assert error is None if message is None else re.search(message, error["message"]), kind
    assert finished.report["first_failure"]["error"]["message"] == exit_["error"]["message"]
    assert "Traceback" not in finished.err
    assert not re.search("[\x07\x1b\x9b]", finished.err), "a worker must not steer the user's terminal"


def test_an_error_file_that_cannot_be_read_is_told_of() -> None:
    under = BY_NOBODY if os.getuid() == 0 else ()
    finished = run(PROGRAMS / "leave_error_file.py", "unreadable", under=under)
    assert finished.returncode == 3
    assert finished.report["first_failure"]["error"] is None
    assert "Permission denied" in finished.err


def test_very_much_said_by_very_many_is_cut_and_the_first_failure_is_kept() -> None:
    finished = run("--nproc-per-node", "12", PROGRAMS / "leave_error_file.py", "large")
    # The first may be told to stop on its way out, because of the second: then its exception counts, as 1.
    assert finished.returncode in (3, 1), finished.err[-2000:]
    exits = finished.report["attempts"][0]["exits"]
    assert len(exits) == 12
    assert len(finished.report["first_failure"]["error"]["traceback"]) > 100_000
    assert all(exit_["error"]["message"] == "large" for exit_ in exits if exit_["error"])


# Arguments and environment.

AWKWARD = [
    b"two words",
    b'it\'s "quoted"',
    b"$(reboot) `reboot` ; & | > /tmp/x * ? ~ \\",
    b"new\nline\ttab\r",
    "Grüße, 世界 🎉".encode(),
    b"invalid \xff\xfe UTF-8 \xc3",
    b"-v",
    b"--nproc-per-node",
    b"",
    b"\x01\x7f",
    b"x" * 100_000,
]


@pytest.mark.parametrize(
    ("start_method", "how"),
    [("spawn", "module"), ("spawn", "program"), ("forkserver", "script")],
)
def test_arguments_and_environment_reach_the_worker_byte_for_byte(start_method: str, how: str, tmp_path: Path) -> None:
    target = tmp_path / "dump"
    program = tmp_path / "dump_input"
    program.write_text(f"#!{os.path.realpath('/proc/self/exe')}\n" + (PROGRAMS / "dump_input.py").read_text())
    program.chmod(0o755)
    what = {
        "script": (PROGRAMS / "dump_input.py",),
        "module": ("-m", "tests.support.programs.dump_input"),
        "program": ("--no-python", program),
    }[how]
    arguments = [os.fsdecode(argument) for argument in AWKWARD]
    env = {f"DUMP_{number}": argument for number, argument in enumerate(arguments)}
    finished = run("--start-method", start_method, *what, *arguments, env={**env, "DUMP_TO": str(target)})
    assert finished.returncode == 0, finished.err
    got = json.loads(target.read_text())
    assert [bytes.fromhex(argument) for argument in got["arguments"]] == AWKWARD
    assert [bytes.fromhex(got["environ"][f"DUMP_{number}"]) for number in range(len(AWKWARD))] == AWKWARD


def test_secrets_of_the_environment_stay_out_of_command_lines_logs_and_report(start_method: str) -> None:
    running = start(
        "--start-method", start_method, "--nproc-per-node", "2", EXIT_WITH, env={"API_TOKEN": "hunter2hunter2"}
    )
    running.wait_for(r"ready \(pid", 2)
    shown = "".join(command_line(int(pid)) for pid in os.listdir("/proc") if pid.isdigit())
    running.signal(signal.SIGTERM)
    finished = running.finish()
    kept = "".join(path.read_text() for path in finished.run_dir.rglob("*") if path.is_file())
    assert "hunter2hunter2" not in shown + kept + finished.out + finished.err


# What the process is started with.


def test_a_start_with_ignored_and_blocked_signals_still_stops_and_learns_how_workers_end(start_method: str) -> None:
    def ignore_and_block() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    options = ("--start-method", start_method, "--nproc-per-node", "2")
    running = start(*options, EXIT_WITH, "1=when-told:9", preexec_fn=ignore_and_block)
    running.wait_for("waits to be told")
    running.wait_for(r"ready \(pid", 2)
    running.signal(signal.SIGTERM)
    finished = running.finish()
    assert finished.returncode == 143, finished.err
    assert [exit_["returncode"] for exit_ in finished.report["attempts"][0]["exits"]] == [-15, -9]


# Limits.


def test_too_few_open_files_are_told_before_anything_starts() -> None:
    finished = run(
        *("--nproc-per-node", "40", EXIT_WITH),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )
    assert_refused(
        finished, NOT_READY, "limit of 64 open files is too low for 40 workers on .*: 272 are needed", "`ulimit -n 272`"
    )


def test_a_low_soft_limit_of_open_files_is_raised_for_us_and_not_for_the_workers(start_method: str) -> None:
    finished = run(
        *("--start-method", start_method, "--nproc-per-node", "12", PROGRAMS / "show_limits.py"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096)),
    )
    assert finished.returncode == 0, finished.err
    assert finished.out.count("open files (64, 4096)") == 12


@pytest.mark.parametrize("limit", [6, 11])
def test_few_open_files_never_show_a_traceback(limit: int) -> None:
    finished = run(
        *("-v", "--nproc-per-node", "2", EXIT_WITH, "*=code:0"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    assert finished.returncode in (0, NOT_READY, NODE_LOST), finished.err
    assert "bug in ddplaunch" not in finished.err


@pytest.mark.parametrize("limit", [2, 7])
def test_few_processes_end_in_a_message(limit: int) -> None:
    with limited("pids", max=limit) as folder:
        finished = run("--nproc-per-node", "4", EXIT_WITH, "*=code:0", under=inside(folder))
    assert finished.returncode in (NOT_READY, NODE_LOST), finished.err
    assert "bug in ddplaunch" not in finished.err
    assert "Traceback" not in finished.err


def test_a_store_that_can_start_no_thread_says_so_in_one_line() -> None:
    code = "import socket; from ddplaunch.rendezvous import store; s = socket.create_server(('127.0.0.1', 0))"
    with limited("pids", max=1) as folder:
        command = [*inside(folder), sys.executable, "-c", f"{code}; store.serve(s.detach())"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(r"it cannot be served: .*\n", done.stderr)


_IN_A_FOLDER_THAT_GOES = ("sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh")


@pytest.mark.parametrize("arguments", [("--plan", "x.py"), (EXIT_WITH,), ("--no-python", "/bin/true")])
def test_a_working_directory_that_is_gone_is_told(tmp_path: Path, arguments: tuple[str | Path, ...]) -> None:
    finished = run(*arguments, cwd=tmp_path, under=_IN_A_FOLDER_THAT_GOES)
    assert_refused(finished, NOT_READY, "error: the working directory: No such file or directory")


# Streams and files that do not do what is usual.


@pytest.mark.parametrize("argument", ["--help", "--version", "--plan"])
def test_a_full_stdout_is_told(argument: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command(argument, EXIT_WITH), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.stderr == "ddplaunch: error: stdout cannot be written: No space left on device\n"
    assert done.returncode == NOT_READY


@pytest.mark.parametrize("argument", ["--help", "--plan"])
def test_a_reader_of_stdout_that_has_gone_ends_the_command_as_sigpipe_would(argument: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command(argument, EXIT_WITH), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_an_error_does_not_go_to_stdout_where_stderr_is_closed() -> None:
    shell = ["sh", "-c", '"$0" "$@" 2>&-', *command("--nope")]
    done = subprocess.run(shell, stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout) == (USAGE, b"")


@pytest.mark.parametrize("option", ["--hostfile", "--env-file"])
def test_a_fifo_without_a_writer_does_not_block(tmp_path: Path, option: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    hosts = ("--hosts", "gpu1") if option == "--env-file" else ()
    finished = run("--plan", *hosts, option, tmp_path / "fifo", EXIT_WITH)
    assert finished.returncode == USAGE
    assert "a FIFO into which nothing is written" in finished.err


def test_a_fifo_with_a_slow_writer_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    writer = subprocess.Popen(["sh", "-c", 'exec 3>"$0" && sleep 0.2 && echo gpu7 >&3', tmp_path / "fifo"])
    finished = run("--plan", "--hostfile", tmp_path / "fifo", EXIT_WITH)
    assert writer.wait(10) == 0
    assert "gpu7" in finished.out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("arguments", [(EXIT_WITH,), ("--ps",)], ids=["run", "ps"])
def test_a_machine_without_proc_is_told(arguments: tuple[str | Path, ...]) -> None:
    without_proc = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
    finished = run(*arguments, under=without_proc)
    assert finished.returncode == NOT_READY, finished.err
    assert "/proc is not mounted on " in finished.err
    assert "Traceback" not in finished.err
