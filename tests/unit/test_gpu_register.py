"""The register of the runs that use GPUs: files of others, a dead agent, a folder that cannot be used."""

from __future__ import annotations

import os
import pwd
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddplaunch.features.free_gpus import choice, register
from ddplaunch.features.free_gpus.records import GpuUser
from ddplaunch.features.free_gpus.register import OwnFile
from tests.support.processes import wait_until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(register.FOLDER_VARIABLE, str(tmp_path / "locks"))
    return tmp_path / "locks"


def run(*gpus: str, pid: int = 7, processes: tuple[tuple[int, int], ...] = ()) -> GpuUser:
    return GpuUser(pid=pid, run_id=f"run{pid}", since_s=0.0, gpus=gpus, processes=processes)


def users() -> list[str]:
    with register.locked(5.0) as opened:
        return [f"{user.run_id} {','.join(user.gpus)}" for user in register.users(opened)]


def add(found: GpuUser) -> OwnFile:
    with register.locked(5.0) as opened:
        return OwnFile(opened, found)


def test_a_run_is_in_the_register_until_it_goes(folder: Path) -> None:
    own = add(run("a", "b"))
    assert users() == ["run7 a,b"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    with register.locked(5.0) as opened:
        assert register.users(opened, own.name) == []
        assert [user.user for user in register.users(opened)] == [pwd.getpwuid(os.geteuid()).pw_name]
        own.write(run("c"))
    assert users() == ["run7 c"]
    own.remove()
    assert users() == [] == os.listdir(folder)


HOLDER = """
import os, time
from ddplaunch.features.free_gpus.records import GpuUser
from ddplaunch.features.free_gpus.register import OwnFile, locked, started
worker = os.fork()
if not worker:
    time.sleep(600)
with locked(5.0) as opened:
    processes = tuple(map(started, (os.getpid(), worker)))
    own = OwnFile(opened, GpuUser(pid=os.getpid(), run_id="r", since_s=0.0, gpus=("a",), processes=processes))
print(worker, flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    worker = int(process.stdout.readline())
    yield process, worker
    for pid in (worker, process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    process.stdout.close()


def test_the_gpus_of_a_killed_agent_are_free_when_its_workers_have_ended(
    folder: Path, holder: tuple[subprocess.Popen[str], int]
) -> None:
    process, worker = holder
    assert users() == ["r a"]
    process.kill()
    process.wait()
    assert users() == ["r a"]
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: users() == [], 10)
    assert os.listdir(folder) == []


def test_a_pid_that_another_process_has_got_keeps_no_gpu(folder: Path) -> None:
    pid, started = register.started(os.getpid())
    own = add(run("a", processes=((pid, started + 1),)))
    os.close(own._fd)
    assert users() == []


def test_what_else_is_in_the_folder_is_passed_over(folder: Path) -> None:
    add(run("a"))
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "garbage").write_text("[" * 10_000)
    (folder / "large").write_bytes(b" " * 100_000)
    secret = folder.parent / "secret"
    secret.write_text("keep")
    os.link(secret, folder / "hard")
    assert users() == ["run7 a"]
    assert secret.read_text() == "keep"
    assert {*os.listdir(folder)} >= {"fifo", "folder", "link", "large", "hard"}


def test_a_file_that_would_steer_the_terminal_is_harmless(folder: Path) -> None:
    with register.locked(5.0) as opened:
        own = OwnFile(opened, run("a"))
        bad = b'{"pid":1,"run_id":"x\\u001b[2J","since_s":1e300,"gpus":["a"]}'
        os.pwrite(own._fd, bad.ljust(16 << 10), 0)
        assert register.users(opened) == []


def test_a_link_in_place_of_the_folder_is_refused(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to(folder.parent / "elsewhere")
    with pytest.raises(OSError, match="Not a directory"):
        users()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_folder_of_another_user_that_is_not_shared_is_refused(folder: Path) -> None:
    folder.mkdir(0o755)
    os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError, match="not all users"), register.locked(0.05):
        pass


def test_a_process_that_keeps_the_folder_locked_is_not_waited_for(folder: Path) -> None:
    who = rf"process {os.getpid()} of {pwd.getpwuid(os.geteuid()).pw_name} has locked it for 0\.05 s"
    with register.locked(5.0), pytest.raises(TimeoutError, match=who), register.locked(0.05):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_two_users_see_each_other_and_cannot_remove_each_others_files(folder: Path, tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    add(run("a"))
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            own = add(run("b", pid=8))
            (other,) = (name for name in os.listdir(folder) if name != own.name)
            try:
                os.unlink(folder / other)
            except PermissionError:
                code = 0 if users() == ["run7 a", "run8 b"] else 2
            os.close(own._fd)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert users() == ["run7 a"]


FULL = """
import os, subprocess
from ddplaunch.features.free_gpus import register
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", os.environ["DDPLAUNCH_LOCK_DIR"]], check=True)
folder = os.environ["DDPLAUNCH_LOCK_DIR"]
run = register.GpuUser(pid=1, run_id="r", since_s=0.0, gpus=("a",))
with register.locked(5.0) as opened:
    own = register.OwnFile(opened, run)
    try:
        with open(folder + "/ballast", "wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(1024))
    except OSError as error:
        print(error.strerror)
    try:
        register.OwnFile(opened, run)
    except OSError as error:
        print(error.strerror, len(os.listdir(folder)))
    own.write(register.GpuUser(pid=1, run_id="r" * 900, since_s=0.0, gpus=("a",)))
    print(len(register.users(opened)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_full_folder_takes_no_new_run_and_keeps_those_that_it_has(folder: Path) -> None:
    folder.mkdir()
    command = ["unshare", "--mount", sys.executable, "-c", FULL]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["No space left on device", "No space left on device 2", "1"]


def test_a_clock_that_is_wrong_only_shows_a_wrong_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    later = GpuUser(user="eve\x1b", pid=7, run_id="r", since_s=1e9, gpus=())
    assert choice.describe(later).startswith(r"run r of eve\x1b (pid 7, since 2001-")


def test_the_folder_is_the_same_for_all_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(register.FOLDER_VARIABLE, raising=False)
    bases = [tmp_path / name for name in ("missing", "private", "shared", "last")]
    for base, mode in zip(bases[1:], (0o755, 0o1777, 0o1777), strict=True):
        base.mkdir()
        base.chmod(mode)
    monkeypatch.setattr(register, "_SHARED_FOLDERS", tuple(map(str, bases)))
    assert register.folder() == str(tmp_path / "shared" / "ddplaunch-gpus")
    assert users() == []


def waits(pid: int, ticket: int, needs: int, *wants: str, processes: tuple[tuple[int, int], ...] = ()) -> GpuUser:
    return GpuUser(
        pid=pid, run_id=f"run{pid}", since_s=0.0, ticket=ticket, needs=needs, wants=wants, processes=processes
    )


FOUND = [choice.Candidate(key, key, "", "") for key in "abc"]


@pytest.mark.parametrize(
    ("others", "ticket", "free", "ahead"),
    [
        ([waits(1, 1, 2, "a", "b")], 0, "c", [1]),
        ([waits(1, 1, 2, "a", "b"), run("c", pid=9)], 0, "", [1]),
        ([waits(2, 2, 1, "a"), waits(1, 1, 1, "b")], 0, "c", [1, 2]),
        ([waits(1, 1, 1, "a"), waits(3, 3, 1, "b")], 2, "bc", [1]),
        ([waits(1, 1, 4, "x", "y")], 2, "abc", []),
    ],
)
def test_what_a_run_waits_for_is_not_free_for_those_that_came_later(
    others: list[GpuUser], ticket: int, free: str, ahead: list[int]
) -> None:
    seen = choice.view(FOUND, others, ticket)
    assert "".join(each.key for each in seen.free) == free
    assert [each.pid for each in seen.ahead] == ahead
    assert register.next_ticket(others) == max(each.ticket for each in others) + 1


def test_a_waiting_run_that_is_suspended_lets_others_pass() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        waiting = waits(1, 1, 1, "a", processes=(register.started(child.pid),))
        assert register.waiting([waiting]) == [waiting]
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: register.waiting([waiting]) == [], 10)
    finally:
        child.kill()
        child.wait()


def test_a_run_whose_user_hides_it_has_no_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    text = choice.describe(GpuUser(user="eve", pid=7, run_id="", since_s=1000.0))
    assert text.startswith("a run of eve (pid 7, since ")
