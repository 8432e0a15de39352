"""--detach: the run goes on without the shell, session and terminal that started it, and what fails at once is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ddplaunch.system import procfs
from tests.support.detached import folder_of, job, launcher_of, report_of, wait_for_log
from tests.support.processes import ignores, is_alive, wait_until
from tests.support.runs import Finished, command, environment, python, run, start

USAGE, NODE_NOT_READY = 2, 82


def in_session(session: int) -> list[int]:
    return [pid for pid in procfs.pids() if (procfs.stat(pid) or [b""] * 4)[procfs.SESSION] == b"%d" % session]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGHUP])
def test_the_end_of_the_shell_and_its_session_does_not_touch_the_run(signum: int, go: Path) -> None:
    words = [*command(), "--detach", *job(go, "--nproc-per-node", "2")]
    shell = subprocess.Popen(
        ["sh", "-c", '"$@"; echo returned; exec sleep 1000', "sh", *words],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert shell.stdout
    with shell, shell.stdout:
        run_id, returned = shell.stdout.readline().strip(), shell.stdout.readline()
        assert returned == "returned\n"
        wait_for_log(run_id, "begins")
        launcher = launcher_of(run_id)
        assert launcher not in in_session(shell.pid)
        for pid in in_session(shell.pid):
            os.kill(pid, signum)
        os.kill(launcher, signal.SIGHUP)
        assert shell.wait(10) == -signum
    assert is_alive(launcher)
    go.touch()
    assert report_of(run_id)["exit_code"] == 7
    wait_until(lambda: not is_alive(launcher))
    log = (folder_of(run_id) / "console.log").read_text()
    assert "ends" in log
    assert "ddplaunch: the job failed" in log


def test_it_returns_within_a_second_and_keeps_nothing_of_the_shell(go: Path) -> None:
    inherited = os.pipe()
    started = time.monotonic()
    returned = run("--detach", *job(go), pass_fds=inherited)
    took_s = time.monotonic() - started
    for fd in inherited:
        os.close(fd)
    assert returned.returncode == 0, returned.err
    assert took_s < 1.0 or os.getloadavg()[0] > 2, took_s
    [run_id] = returned.out.split()
    lines = returned.err.splitlines()
    assert lines[0] == f"ddplaunch: the run goes on without this terminal; its output: {folder_of(run_id)}/console.log"
    assert f"--kill {run_id}" in lines[1]
    launcher = launcher_of(run_id)
    assert os.getsid(launcher) == launcher
    assert ignores(launcher, signal.SIGHUP)
    assert os.readlink(f"/proc/{launcher}/fd/0") == os.devnull
    targets = [os.readlink(f"/proc/{launcher}/fd/{fd}") for fd in (1, 2)]
    assert targets == [str(folder_of(run_id) / "console.log")] * 2
    held = {os.readlink(f"/proc/{launcher}/fd/{fd}") for fd in os.listdir(f"/proc/{launcher}/fd")}
    assert not {os.readlink(f"/proc/self/fd/{fd}") for fd in (0,) if os.isatty(fd)} & held
    os.kill(launcher, signal.SIGTERM)
    assert report_of(run_id)["exit_code"] == 128 + signal.SIGTERM


def test_what_runs_after_the_job_also_writes_to_its_console(go: Path) -> None:
    go.touch()
    with_command = job(go, "--on-exit", "echo after; echo to stderr >&2", "-v")
    [run_id] = detached_for(0.0, "--detach", *with_command).out.split()
    wait_for_log(run_id, "to stderr")
    log = (folder_of(run_id) / "console.log").read_text()
    assert log.index("ddplaunch: the job failed") < log.index("after\nto stderr\n")


def detached_for(look_s: float, *arguments: str) -> Finished:
    """The command, which looks at the launcher for ``look_s``."""
    code = (
        "import sys; from ddplaunch.features.come_back import detached; from ddplaunch.cli.main import main; "
        "detached._RETURN_S = detached._LOOK_S = float(sys.argv[1]); main(sys.argv[2:])"
    )
    return python("-c", code, str(look_s), *arguments)


def test_a_run_that_fails_at_once_is_shown_with_its_exit_code(go: Path) -> None:
    go.touch()
    ended = detached_for(60, "--detach", *job(go))
    assert ended.returncode == 7
    assert ended.out == ""
    assert "exit code 7" in ended.err


def test_an_error_of_the_launcher_is_shown_once(tmp_path: Path) -> None:
    ended = detached_for(60, "--detach", "--no-python", str(tmp_path / "missing"))
    assert ended.returncode == NODE_NOT_READY
    assert ended.err.count("no such program") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--chdir", "/no-such", "x.py"), "--chdir /no-such: no such folder"),
        (("--dry-run", "--nnodes", "3", "--no-python", "true"), "--dry-run"),
    ],
)
def test_what_an_agent_finds_is_an_error_of_the_command(arguments: tuple[str, ...], text: str) -> None:
    """However slow this machine is: the command waits for the agent."""
    ended = detached_for(0.0, "--detach", *arguments)
    assert (ended.returncode, ended.out) == (NODE_NOT_READY, ""), ended.err
    assert text in ended.err


def test_without_a_stdout_the_error_names_the_run(go: Path) -> None:
    with open("/dev/full", "w") as full:
        started = start("--detach", *job(go), stdout=full).finish()
    assert started.returncode == NODE_NOT_READY
    told = re.search(r"run (\S+) has started, but stdout cannot be written: No space left on device", started.err)
    assert told, started.err
    assert is_alive(launcher_of(told[1]))
    closed = start("--detach", *job(go), under=("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")).finish()
    assert closed.returncode == 0
    go.touch()
    folders = [path for path in folder_of("").iterdir() if path.is_dir()]
    assert [report_of(path.name)["exit_code"] for path in folders] == [7, 7]


def test_in_another_folder_the_way_back_names_it(go: Path, tmp_path: Path) -> None:
    started = run("--detach", "--log-dir", "my runs", *job(go), cwd=tmp_path)
    assert f"--attach {started.out.strip()} --log-dir '{tmp_path}/my runs'; to end it" in started.err
    nowhere = run("--detach", *job(go), env={"HOME": "", "XDG_STATE_HOME": "", "TMPDIR": str(tmp_path)})
    [folder] = tmp_path.glob(f"ddplaunch-*/{nowhere.out.strip()}")
    assert f"--log-dir {folder.parent}; to end it" in nowhere.err
    go.touch()
    wait_until((folder / "report.json").exists, 30)


def test_a_run_that_succeeds_at_once_has_an_id() -> None:
    ended = detached_for(60, "--detach", "--no-python", "true")
    assert ended.returncode == 0
    assert report_of(ended.out.strip())["exit_code"] == 0
    assert "has succeeded already" in ended.err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("missing.py",), NODE_NOT_READY, "missing.py: no such file on"),
        (("--hosts", "gpu[1-", "x.py"), USAGE, "gpu[1-"),
        (("--log-dir", "/proc/none", "--no-python", "true"), NODE_NOT_READY, "no logs are kept: /proc/none"),
    ],
)
def test_what_cannot_be_detached_is_refused_at_once(arguments: tuple[str, ...], code: int, text: str) -> None:
    refused = run("--detach", *arguments)
    assert (refused.returncode, refused.out) == (code, "")
    assert text in refused.err
    base = Path(os.environ["XDG_STATE_HOME"], "ddplaunch")
    assert not base.exists() or not [path for path in base.iterdir() if path.is_dir()]


def test_a_launcher_per_node_is_refused_by_one_message() -> None:
    env = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "job1"}
    ranks = [{"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank} for rank in ("0", "1")]
    ended = [run("--detach", "--no-python", "true", env={**env, **rank}) for rank in ranks]
    assert [each.returncode for each in ended] == [USAGE, USAGE]
    assert "".join(each.err for each in ended).count("not where each node has a launcher") == 1


def test_the_python_api_says_what_to_do() -> None:
    from ddplaunch import UsageError, launch

    with pytest.raises(UsageError, match="launch has no option detach") as error:
        launch("x.py", detach=True)
    assert "--detach" in error.value.hint
