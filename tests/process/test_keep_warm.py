"""--keep-warm: the next run takes over what a run has left, and gets all that its own command has set."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.features.warm import keeper_files
from tests.support import runs
from tests.support.cgroups import inside, limited_memory
from tests.support.processes import children, command_line, is_alive, pids_with, wait_until
from tests.support.runs import PROGRAMS, Finished, Running, run, start

pytestmark = pytest.mark.usefixtures("stub_is_installed")

WITH_TORCH = sys.executable
TAKEN = "torch was imported by an earlier run"
PRINT_SIGNALS = PROGRAMS / "print_signals.py"


class Kept:
    """A state folder, and the keeper that runs with it have left."""

    def __init__(self, state: Path) -> None:
        self.state = state

    @property
    def environ(self) -> dict[str, str]:
        return {"XDG_STATE_HOME": str(self.state)}

    @property
    def socket(self) -> Path:
        return keeper_files.in_base(self.state / "ddplaunch")

    def run(self, *arguments: str | Path, env: dict[str, str] | None = None, **options: Any) -> Finished:
        return run("-v", *arguments, env={**self.environ, **(env or {})}, **options)

    def start(self, *arguments: str | Path) -> Running:
        return start("-v", "--shutdown-timeout", "1", *arguments, env=self.environ)

    def leave(self, *options: str) -> int:
        """Leave a keeper, and return its pid."""
        finished = self.run("--keep-warm", "5m", *options, "-m", "ddplaunch.version")
        assert finished.returncode == 0, finished.err
        wait_until(self.socket.exists, 30, keeper_files.reason(self.socket))
        return self.pid()

    def pid(self) -> int:
        return wait_until(lambda: [pid for pid in keepers() if mark_of(pid) == str(self.state)])[0]

    def why(self) -> str:
        return keeper_files.reason(self.socket)

    def end(self) -> None:
        for pid in [pid for pid in keepers() if mark_of(pid) == str(self.state)]:
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda pid=pid: not is_alive(pid))


def keepers() -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if command_line(pid).startswith("ddplaunch keeper") and is_alive(pid)]


def mark_of(pid: int) -> str:
    """The state folder of a keeper."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((line[15:].decode() for line in variables if line.startswith(b"XDG_STATE_HOME=")), "")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, python_with_stub: str) -> Iterator[Kept]:
    """A keeper for runs with one or two workers on this machine's CPUs; a test must not end it."""
    kept = Kept(tmp_path_factory.mktemp("warm"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python_with_stub)
        patch.delenv("PYTHONPATH", raising=False)
        kept.leave("--nproc-per-node", "2")
    yield kept
    kept.end()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Kept]:
    """A state folder without a keeper; one that is left in it is ended."""
    kept = Kept(tmp_path / "state")
    yield kept
    kept.end()


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """A script in a folder of its own, which prints all that it sees of its process."""
    (tmp_path / "job").mkdir()
    return Path(shutil.copy(PROGRAMS / "probe.py", tmp_path / "job"))


def seen(finished: Finished) -> list[dict[str, Any]]:
    """What each worker saw, without what differs between any two runs."""
    assert finished.returncode == 0, finished.err
    lines = [re.fullmatch(r"\[\S+:(\d+)\] (\{.*)", line) for line in finished.out.splitlines()]
    found = [json.loads(match[2]) for match in sorted(filter(None, lines), key=lambda match: int(match[1]))]
    assert len(found) == 2, finished.out
    texts = sorted(each.pop("stdin") for each in found)  # Whichever rank reads first has all of it.
    found[0]["stdin"] = texts
    for process in (each["process"] for each in found):
        process["cgroup"] = re.sub(r"ddplaunch-[^/\n]*", "ddplaunch", process["cgroup"])
        for environ in (process["environ"], process["environ of C"]):
            names = [name for name in environ if re.search("RUN_ID|_FILE|PORT", name)]
            environ.update(dict.fromkeys(names, "of this run"))
    return found


@pytest.mark.slow
@pytest.mark.torch
def test_a_worker_sees_the_same_as_in_a_run_that_imports_for_itself(
    own: Kept, probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Working directory, environment, umask, streams, limits, signals, session, descriptors, memory of the parent."""
    monkeypatch.setattr(sys, "executable", WITH_TORCH)
    own.leave("--nproc-per-node", "2")
    (folder := tmp_path / "elsewhere").mkdir()
    env = {"SENTINEL": "in\u00e9rited \udcff", "EMPTY": ""}
    options = ("--nproc-per-node", "2", probe, "torch", "stdin")
    results = []
    for keep in (("--keep-warm", "0"), ()):
        with open(probe) as stdin:
            finished = own.run(*keep, *options, env=env, cwd=folder, umask=0o027, stdin=stdin)
        assert (TAKEN in finished.err) is not bool(keep), finished.err
        assert "anew" not in finished.err
        results.append(seen(finished))
    assert results[0] == results[1]
    assert results[1][0]["process"]["cwd"] == str(folder)
    summed = own.run("--nproc-per-node", "2", PROGRAMS / "allreduce.py", "3")
    assert (TAKEN in summed.err, summed.out.count("] sum 3 in attempt 0")) == (True, 2), summed.err


def test_an_edited_line_counts_in_the_script_and_in_its_modules(shared: Kept, tmp_path: Path) -> None:
    script, module = tmp_path / "train.py", tmp_path / "mine.py"
    for number in (1, 2):
        script.write_text(f"import torch, mine; print('script', {number}, 'module', mine.NUMBER)")
        module.write_text(f"NUMBER = {number}" + "\n" * number)  # Python tells files of one second by their sizes.
        finished = shared.run("--nproc-per-node", "2", script)
        assert TAKEN in finished.err
        assert finished.out.count(f"script {number} module {number}") == 2
    assert "mine" not in Path(f"/proc/{shared.pid()}/maps").read_text()


def test_the_agent_starts_the_workers_and_has_the_run_tag(shared: Kept) -> None:
    """As in every run: workers are children of the agent, and a sweep finds every process by its environment."""
    running = shared.start("--rdzv-id", "tagged", "--nproc-per-node", "2", PRINT_SIGNALS, "60")
    workers = {int(match[1]) for match in running.wait_for(r"ready \(pid: (\d+)", 2)}
    agent = wait_until(lambda: children(shared.pid()))[0]
    helpers = {pid for pid in children(agent) if command_line(pid).startswith("ddplaunch ")}
    assert workers <= set(children(agent))
    assert {command_line(pid).split()[1] for pid in helpers} == {"forkserver", "store"}
    tag = next(word for word in Path(f"/proc/{agent}/environ").read_text().split("\0") if "RUN_ID=tagged" in word)
    assert {agent, *workers, *helpers} == set(pids_with(tag))
    assert not any("sock" in os.readlink(f"/proc/{pid}/fd/{fd}") for pid in workers for fd in (0, 1, 2))
    running.signal(signal.SIGTERM)
    assert running.finish().returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_several_runs_use_it_at_the_same_time(shared: Kept) -> None:
    first = shared.start("--nproc-per-node", "2", PRINT_SIGNALS, "60")
    first.wait_for(r"ready \(pid", 2)
    second = shared.start("--nproc-per-node", "2", PRINT_SIGNALS, "60")
    second.wait_for(r"ready \(pid", 2)
    third = shared.run("-m", "ddplaunch.version")
    assert (third.returncode, TAKEN in third.err) == (0, True), third.err
    assert re.search(r"used by process \d+, \d+ ", shared.run("--ps").out)
    for each in (second, first):
        each.signal(signal.SIGTERM)
        assert each.finish().returncode == 128 + signal.SIGTERM
        assert TAKEN in each.error_lines[0]


def test_another_environment_starts_afresh_and_says_why(shared: Kept) -> None:
    """What else may differ: tests/unit/test_keeper.py."""
    finished = shared.run("--nproc-per-node", "2", "-m", "ddplaunch.version", env={"OMP_NUM_THREADS": "7"})
    assert finished.returncode == 0, finished.err
    said = "imports torch anew, in place of what was left: the environment variable OMP_NUM_THREADS has changed"
    assert said in finished.err


def test_a_further_variable_that_is_set_before_imports_needs_no_change_here(own: Kept, tmp_path: Path) -> None:
    """A copy of the package has one, with a name that torch's libraries read; it depends on the number of workers."""
    package = shutil.copytree(runs.ROOT / "ddplaunch", tmp_path / "copy" / "ddplaunch", copy_function=os.link)
    file = package / "protocol" / "environment.py"
    line, text = '        env.setdefault("OMP_NUM_THREADS"', file.read_text()
    file.unlink()  # A link to the original.
    text = text.replace(line, f'        env.setdefault("TORCH_SHARES", str(local_world_size))\n{line}')
    file.write_text(text.replace("SET_BEFORE_IMPORTS = (", 'SET_BEFORE_IMPORTS = ("TORCH_SHARES", '))
    env = {"OMP_NUM_THREADS": "1"}
    two = ("--keep-warm", "5m", "--nproc-per-node", "2", "-m", "ddplaunch.version")
    assert own.run(*two, env=env, cwd=package.parent).returncode == 0
    wait_until(own.socket.exists, 30, own.why())
    again = own.run(*two, env=env, cwd=package.parent)
    assert (TAKEN in again.err, "anew" in again.err) == (True, False), again.err
    other = own.run("--nproc-per-node", "3", "-m", "ddplaunch.version", env=env, cwd=package.parent)
    assert "in place of what was left: the environment variable TORCH_SHARES has changed" in other.err, other.err


def memory(pid: int) -> bytes:
    """What a process may write."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
        areas = re.findall(r"^(\w+)-(\w+) rw", maps.read(), re.MULTILINE)
        read = [os.pread(mem.fileno(), int(end, 16) - int(begin, 16), int(begin, 16)) for begin, end in areas]
    return b"".join(read)


def test_nothing_of_the_environment_of_a_run_stays(own: Kept, tmp_path: Path) -> None:
    """Neither of the run that has left the keeper nor of one that has used it."""
    first, second = (os.urandom(12).hex() for _ in range(2))
    assert own.run("--keep-warm", "5m", "-m", "ddplaunch.version", env={"MY_TOKEN": first}).returncode == 0
    wait_until(own.socket.exists, 30)
    keeper = own.pid()
    (script := tmp_path / "show.py").write_text("import os; print(os.environ['MY_TOKEN'])")
    finished = own.run(script, env={"MY_TOKEN": second})
    assert (TAKEN in finished.err, second in finished.out) == (True, True), finished.err
    wait_until(lambda: "waits" in command_line(keeper))
    for token in (first, second):
        assert token.encode() not in Path(f"/proc/{keeper}/environ").read_bytes() + memory(keeper)


def test_other_modules_in_preload_start_afresh(shared: Kept) -> None:
    finished = shared.run("--preload", "json", "-m", "ddplaunch.version")
    assert "torch is imported anew: other modules in --preload" in finished.err


def test_a_file_that_would_hide_a_module_starts_afresh(shared: Kept, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "datetime.py").touch()
    finished = shared.run("--nproc-per-node", "2", tmp_path / "train.py")
    assert f"{tmp_path}/datetime.py would hide a module" in finished.err


def test_only_this_user_can_reach_it(shared: Kept) -> None:
    assert stat.S_IMODE(shared.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(shared.socket.parent.stat().st_mode) == 0o700
    opened = [os.readlink(path) for path in Path(f"/proc/{shared.pid()}/fd").iterdir()]
    assert sum(name.startswith("socket:") for name in opened) == 1
    assert not any(name.startswith("/dev/") and name != "/dev/null" for name in opened)


@pytest.mark.slow
def test_it_ends_at_its_time(own: Kept) -> None:
    finished = own.run("--keep-warm", "0.2", "-m", "ddplaunch.version")
    assert finished.returncode == 0, finished.err
    wait_until(lambda: own.why() == "no run used it for 0.2 s", 30)
    assert not own.socket.exists()


@pytest.mark.slow
def test_the_last_run_with_the_option_sets_its_time_or_replaces_it_and_kill_ends_it_alone(own: Kept) -> None:
    pid = own.leave()
    until = wait_until(lambda: "waits" in (line := command_line(pid)) and line)
    assert own.run("-m", "ddplaunch.version").returncode == 0
    wait_until(lambda: "waits" in command_line(pid))
    assert command_line(pid) == until
    own.run("--keep-warm", "1h", "-m", "ddplaunch.version")
    wait_until(lambda: "waits" in command_line(pid) and command_line(pid) != until)
    other = {"OMP_NUM_THREADS": "7"}
    assert "anew, in place of" in own.run("--keep-warm", "5m", "-m", "ddplaunch.version", env=other).err
    wait_until(lambda: not is_alive(pid) and own.socket.exists(), 30, own.why())
    again = own.run("-m", "ddplaunch.version", env=other)
    assert (TAKEN in again.err, "anew" in again.err) == (True, False)
    running = start("-v", "--shutdown-timeout", "1", PRINT_SIGNALS, "60", env={**own.environ, **other})
    running.wait_for(r"ready \(pid")
    listed = own.run("--ps").out
    assert re.search(r"^warm +kept .* +used by process \d+ +\S+ +1 keeper +\d+ MB$", listed, re.MULTILINE), listed
    killed = own.run("--kill", "warm")
    assert (killed.returncode, "ended 1 keeper" in killed.err) == (0, True)
    assert not keepers_of(own)
    running.signal(signal.SIGTERM)  # The run that used it goes on.
    assert "got SIGTERM" in running.finish().out
    assert "nothing is kept warm" in own.run("--kill", "warm").err


_ASK = """
import os, sys
from ddplaunch.features.warm import keeper_files
from ddplaunch.features.warm import keeper_client
path = keeper_files.path(os.environ)
environ = {**os.environ, "DDPLAUNCH_RUN_ID": "late.1"}
request = keeper_client.takeover(environ, os.getcwd(), (), "", ("x",), 3600.0)
print(keeper_client.ask(path, request, environ, os.getcwd(), (0, 1, 2)), flush=True)
print("read", sys.stdin.readline().strip())
"""


def test_an_answer_that_comes_too_late_takes_nothing(shared: Kept) -> None:
    """Two agents with one stdin would each read a part of what the launcher sends over SSH."""
    keeper = shared.pid()
    until = wait_until(lambda: "waits" in (line := command_line(keeper)) and line)
    os.kill(keeper, signal.SIGSTOP)
    try:
        env = runs.environment(shared.environ)
        with subprocess.Popen([sys.executable, "-c", _ASK], stdin=-1, stdout=-1, text=True, env=env) as process:
            assert process.stdin
            assert process.stdout
            assert process.stdout.readline().startswith("it does not answer")
            os.kill(keeper, signal.SIGCONT)
            wait_until(lambda: "waits" in command_line(keeper) and command_line(keeper) != until)
            assert process.communicate("a line\n")[0] == "read a line\n"
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert TAKEN in shared.run("--nproc-per-node", "2", "-m", "ddplaunch.version").err


def test_a_client_that_sends_rubbish_or_little_costs_a_second(shared: Kept) -> None:
    opened = len(os.listdir(f"/proc/{shared.pid()}/fd"))
    for head in (b"\0", b"\x7f" * 8, (4).to_bytes(8, "big") + b"null", (1 << 20).to_bytes(8, "big")):
        with socket.socket(socket.AF_UNIX) as client, keeper_files.short_path(shared.socket) as address:
            client.connect(address)
            socket.send_fds(client, [head], [0] * 100)
            with contextlib.suppress(OSError):
                while not select.select([client], [], [], 0.01)[0]:
                    client.sendall(b"x")  # Never for so long that a single read would time out.
    assert TAKEN in shared.run("--nproc-per-node", "2", "-m", "ddplaunch.version").err
    wait_until(lambda: len(os.listdir(f"/proc/{shared.pid()}/fd")) == opened)


_FAIL = """
import sys
from ddplaunch.cli.main import main
from ddplaunch.launcher import setup
def fail(*_, **__): raise RuntimeError("no console")
setup.open_console = fail
main()
"""


def test_a_launcher_that_fails_after_it_has_sent_the_spec_leaves_nothing(shared: Kept) -> None:
    script = ("-v", "--rdzv-id", "fails", "--nproc-per-node", "2", str(PRINT_SIGNALS), "60")
    done = subprocess.run(
        [sys.executable, "-c", _FAIL, *script], env=runs.environment(shared.environ), capture_output=True, text=True
    )
    assert (done.returncode != 0, "no console" in done.stderr) == (True, True), done.stderr
    assert not [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if "=fails." in environ_of(pid)]
    assert TAKEN in shared.run("--nproc-per-node", "2", "-m", "ddplaunch.version").err


def environ_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def fill(folder: Path, part: float) -> subprocess.Popen[str]:
    """A process in the cgroup that takes so much of its memory, caches of files included."""
    limit, used = (
        next(int((folder / f"memory.{name}").read_text()) for name in names if (folder / f"memory.{name}").exists())
        for names in (("limit_in_bytes", "max"), ("usage_in_bytes", "current"))
    )
    code = f"import time; kept = b'x' * {int(limit * part) - used}; print(flush=True); time.sleep(60)"
    process = subprocess.Popen([*inside(folder), sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    process.stdout.readline()
    return process


@pytest.mark.slow
def test_it_ends_where_memory_is_scarce(own: Kept) -> None:
    with limited_memory(1200 << 20) as folder:
        done = run("--keep-warm", "5m", "-m", "ddplaunch.version", under=inside(folder), env=own.environ)
        assert done.returncode == 0, done.err
        wait_until(own.socket.exists, 30, own.why())
        with fill(folder, 0.97) as process:
            wait_until(lambda: not own.socket.exists(), 20)
            process.kill()
    assert re.fullmatch(r"only \d+ MiB of the cgroup's 1200 MiB were available", own.why())


def test_it_ends_with_the_session_of_the_command(own: Kept) -> None:
    command = shlex.join(runs.command("--keep-warm", "5m", "-m", "ddplaunch.version"))
    env = runs.environment(own.environ)
    with subprocess.Popen(["bash", "-c", f"{command}; read"], stdin=subprocess.PIPE, env=env, start_new_session=True):
        wait_until(own.socket.exists, 30, own.why())
    wait_until(lambda: own.why() == "the session or the scheduler's job that left it has ended")
    assert not own.socket.exists()


@pytest.mark.slow
def test_a_module_of_the_user_is_never_kept(own: Kept, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    env = {"PYTHONPATH": str(tmp_path)}
    finished = own.run("--keep-warm", "5m", "--preload", "mine", "-m", "ddplaunch.version", env=env)
    assert finished.returncode == 0, finished.err
    wait_until(lambda: "is not a folder of installed packages" in own.why(), 30, own.why())
    assert not own.socket.exists()
    (tmp_path / "sitecustomize.py").write_text("")
    again = own.run("--keep-warm", "5m", "-m", "ddplaunch.version", env=env)
    assert f"torch is imported anew: mine comes from {tmp_path}/mine.py" in again.err
    wait_until(lambda: own.why().startswith(f"sitecustomize comes from {tmp_path}/sitecustomize.py"), 30, own.why())
    wait_until(lambda: not keepers_of(own), 30)


def keepers_of(kept: Kept) -> list[int]:
    return [pid for pid in keepers() if mark_of(pid) == str(kept.state)]


def test_without_the_option_nothing_is_left(own: Kept) -> None:
    assert own.run("-m", "ddplaunch.version").returncode == 0
    assert not keepers_of(own)
    assert not list((own.state / "ddplaunch").glob("warm*"))


def agent_of(running: Running, kept: Kept) -> int:
    return wait_until(lambda: children(kept.pid()))[0]


def forkserver_of(running: Running, kept: Kept) -> int:
    agent = agent_of(running, kept)
    return next(pid for pid in children(agent) if command_line(pid).startswith("ddplaunch forkserver"))


VICTIMS: dict[str, Callable[[Running, Kept], int]] = {
    "launcher": lambda running, _: running.pid,
    "agent": agent_of,
    "forkserver": forkserver_of,
    "keeper": lambda _, kept: kept.pid(),  # The last: the next run finds none.
}


@pytest.mark.slow
def test_whatever_is_killed_nothing_of_the_run_is_left_and_the_next_works(own: Kept) -> None:
    own.leave("--nproc-per-node", "2")
    for victim, find in VICTIMS.items():
        running = own.start("--rdzv-id", "mine", "--nproc-per-node", "2", PRINT_SIGNALS, "60")
        running.wait_for(r"ready \(pid", 2)
        agent = Path(f"/proc/{agent_of(running, own)}/environ").read_text().split("\0")
        tag = next(word for word in agent if "RUN_ID=mine" in word)
        os.kill(find(running, own), signal.SIGKILL)
        if victim in ("forkserver", "keeper"):
            running.signal(signal.SIGTERM)
        running.finish()
        wait_until(lambda tag=tag: not pids_with(tag), 10, f"{victim} was killed; left: {pids_with(tag)}")
        again = own.run("--nproc-per-node", "2", "-m", "ddplaunch.version")
        assert again.returncode == 0, again.err
        assert (TAKEN in again.err) is (victim != "keeper"), again.err
