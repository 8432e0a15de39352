"""A run's folder is private, its own, and only the newest are kept; nothing that goes on or is not ours is deleted."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ddplaunch.errors import UsageError
from ddplaunch.system import run_folder
from ddplaunch.system.run_retention import prune

ROOT = Path(run_folder.__file__).parents[2]

CREATE = (
    "import sys, pathlib; from ddplaunch.system.run_folder import create;"
    "from ddplaunch.system.run_retention import prune;"
)
"""Locks are held by processes, so other runs are other processes here."""


def other_run(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CREATE + code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def old_run(base: Path, name: str, age_s: float) -> Path:
    """A run that has ended."""
    folder = base / name
    folder.mkdir(parents=True)
    lock = folder / run_folder.LOCK
    lock.touch()
    os.utime(lock, (1e9 - age_s, 1e9 - age_s))
    (folder / "attempt_0" / "0").mkdir(parents=True)
    (folder / "attempt_0" / "0" / "stdout.log").write_text("x")
    return folder


def test_the_folder_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = run_folder.create(tmp_path / "state" / "ddplaunch", "run")
    finally:
        os.umask(before)
    assert folder == tmp_path / "state" / "ddplaunch" / "run"
    for path in (folder, folder.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_run_ids_sort_by_time_and_differ() -> None:
    ids = [run_folder.new_run_id() for _ in range(50)]
    assert len(set(ids)) == 50
    assert [name[:15] for name in ids] == sorted(name[:15] for name in ids)


def test_a_taken_run_id_gets_a_number(tmp_path: Path) -> None:
    (tmp_path / "job.3").write_text("a file")
    names = [run_folder.create(tmp_path, "job").name for _ in range(3)]
    assert names == ["job", "job.2", "job.4"]


def test_runs_that_start_at_once_with_one_id_get_a_folder_each(tmp_path: Path) -> None:
    code = "print('ready', flush=True); input(); print(create(pathlib.Path(sys.argv[1]), 'job').name)"
    runs = [other_run(code, tmp_path / "base") for _ in range(6)]
    for run in runs:
        assert run.stdout
        assert run.stdout.readline() == "ready\n"
    for run in runs:
        assert run.stdin
        run.stdin.write("\n")
        run.stdin.flush()
    names = {run.communicate(timeout=60)[0].strip() for run in runs}
    assert names == {"job", "job.2", "job.3", "job.4", "job.5", "job.6"}


def test_the_newest_twenty_runs_are_kept(tmp_path: Path) -> None:
    runs = [old_run(tmp_path, f"run{number:02d}", age_s=100 - number) for number in range(25)]
    prune(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == [run.name for run in runs[5:]]


def test_a_run_that_goes_on_is_kept_however_old_it_is(tmp_path: Path) -> None:
    code = "print(create(pathlib.Path(sys.argv[1]), 'old'), flush=True); input()"
    run = other_run(code, tmp_path)
    assert run.stdout
    folder = Path(run.stdout.readline().strip())
    os.utime(folder / run_folder.LOCK, (1, 1))
    for number in range(25):
        old_run(tmp_path, f"run{number:02d}", age_s=number)
    prune(tmp_path, 20)
    assert folder.is_dir()
    run.communicate("\n", timeout=60)
    prune(tmp_path, 20)
    assert not folder.exists(), "it ended, however it did, so nothing holds it any more"


def test_what_is_not_ours_is_never_deleted(tmp_path: Path) -> None:
    base, elsewhere = tmp_path / "base", tmp_path / "elsewhere"
    old_run(elsewhere, "precious", age_s=1e6)
    for number in range(22):
        old_run(base, f"run{number:02d}", age_s=number)
    (base / "notes").mkdir()
    (base / "notes" / "notes.txt").write_text("mine")
    (base / "file").write_text("mine")
    (base / "link").symlink_to(elsewhere / "precious")
    old_run(base, "zz-linked", age_s=1e5)
    (base / "zz-linked" / "data").symlink_to(elsewhere / "precious")
    prune(base, 20)
    assert (elsewhere / "precious" / "attempt_0" / "0" / "stdout.log").exists()
    assert {"notes", "file", "link"} <= {path.name for path in base.iterdir()}
    assert not (base / "zz-linked").exists()


def test_pruning_passes_over_what_it_cannot_read(tmp_path: Path) -> None:
    prune(tmp_path / "missing", None)
    (tmp_path / "file").touch()
    prune(tmp_path / "file", 20)


def test_two_runs_that_prune_at_once_do_not_get_into_each_others_way(tmp_path: Path) -> None:
    for number in range(120):
        old_run(tmp_path, f"run{number:03d}", age_s=1000 - number)
    code = "prune(pathlib.Path(sys.argv[1]), 20)"
    for run in [other_run(code, tmp_path) for _ in range(3)]:
        run.communicate(timeout=60)
        assert run.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"run{number:03d}" for number in range(100, 120)]


def test_a_file_in_the_place_of_the_base_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(UsageError, match=f"--log-dir {path}: is a file"):
        run_folder.create(path, "run")
    with pytest.raises(OSError, match="Not a directory"):
        run_folder.create(path / "below", "run")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_STATE_HOME": "/state"}, "/state/ddplaunch"),
        ({"XDG_STATE_HOME": ""}, "/home/ada/.local/state/ddplaunch"),
        ({"XDG_STATE_HOME": "relative/is/invalid"}, "/home/ada/.local/state/ddplaunch"),
        ({}, "/home/ada/.local/state/ddplaunch"),
        ({"HOME": "/home/ada"}, "/home/ada/.local/state/ddplaunch"),
    ],
)
def test_the_default_follows_the_xdg_specification(
    environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert run_folder.default_base(environ) == Path(expected)


def test_a_user_without_a_home_gets_a_private_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    base = run_folder.default_base({})
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    assert base.parent == tmp_path


def test_an_empty_home_is_none() -> None:
    assert run_folder.base_at_home({"HOME": ""}) is None


def test_without_a_home_and_a_temporary_folder_only_the_creation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: str) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    assert not run_folder.default_base({"HOME": ""}).exists()


def test_parents_are_private_too(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = run_folder.create(tmp_path / ".local" / "state", "job")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, *list(folder.parents)[:2])]
    assert modes == [0o700] * 3


def test_a_node_does_not_write_where_another_user_may_have_linked_to(tmp_path: Path) -> None:
    base, elsewhere = tmp_path / "base", tmp_path / "elsewhere"
    base.mkdir()
    base.chmod(0o1777)
    elsewhere.mkdir()
    (base / "job").symlink_to(elsewhere)
    assert run_folder.share(base, "job", "node1") == base / "job.2" / "node1"
    assert list(elsewhere.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_node_does_not_use_another_users_folder(tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "job").mkdir(parents=True)
    os.chown(base / "job", 65534, 65534)
    assert run_folder.share(base, "job", "node1") == base / "job" / "node1"
    base.chmod(0o1777)
    assert run_folder.share(base, "job", "node2") == base / "job.2" / "node2"


def test_a_node_has_a_folder_of_its_own_in_the_run_that_it_takes_part_in(tmp_path: Path) -> None:
    launchers = run_folder.create(tmp_path, "job")
    assert [run_folder.share(tmp_path, "job", host) for host in ("a", "b")] == [launchers / "a", launchers / "b"]
    assert run_folder.create(tmp_path, "job").name == "job.2"


def test_a_node_never_writes_over_what_an_earlier_run_has_left_there(tmp_path: Path) -> None:
    (tmp_path / "job" / "a").mkdir(parents=True)
    (tmp_path / "job.2").write_text("a file")
    assert run_folder.share(tmp_path, "job", "a") == tmp_path / "job.3" / "a"
    nowhere = tmp_path / "job.2" / "below"
    assert run_folder.share(nowhere, "job", "a") == nowhere / "job" / "a"


def test_launchers_of_one_run_count_as_one(tmp_path: Path) -> None:
    of_one = [old_run(tmp_path, f"job.{number}" if number else "job", age_s=50) for number in (0, *range(2, 32))]
    later = [old_run(tmp_path, f"run{number:02d}", age_s=40 - number) for number in range(19)]
    prune(tmp_path, 20)
    assert {path.name for path in tmp_path.iterdir()} == {run.name for run in (*of_one, *later)}
    one_more = old_run(tmp_path, "job.99", age_s=-1000)  # Of the same name, but much later.
    prune(tmp_path, 20)
    assert {path.name for path in tmp_path.iterdir()} == {run.name for run in (*later, one_more)}


def test_hundreds_of_one_name_find_a_folder(tmp_path: Path) -> None:
    names = {run_folder.create(tmp_path, "job").name for _ in range(200)}
    assert len(names) == 200


@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("reason", ["no locks", "another machine"])
def test_a_run_whose_lock_tells_nothing_goes_on_until_its_report_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, is_over: bool
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if reason == "no locks":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    with run_folder.released(run_folder.create(tmp_path, "first")):
        pass
    if reason != "no locks":
        (tmp_path / "first" / run_folder.LOCK).write_text("another\n")
    if is_over:
        (tmp_path / "first" / "report.json").touch()
    now_s = time.time()
    for number in range(20):
        os.utime(old_run(tmp_path, f"later{number}", 0) / run_folder.LOCK, (now_s + 1, now_s + 1))
    prune(tmp_path, 20)
    assert (tmp_path / "first").exists() is not is_over


def test_a_lock_is_given_up_with_the_run(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with run_folder.released(run_folder.create(tmp_path, "run")):
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    assert os.listdir("/proc/self/fd") == before
