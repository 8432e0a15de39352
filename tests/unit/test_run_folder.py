"""A run's folder is private and its own; where every node has a launcher, it is in one that they share."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ddplaunch.errors import UsageError
from ddplaunch.system.files import run_folder
from tests.support import golden

ROOT = Path(run_folder.__file__).parents[2]

CREATE = "import sys, pathlib; from ddplaunch.system.files.run_folder import create;"
"""Locks are held by processes, so other runs are other processes here."""


def other_run(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CREATE + code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def told_at_once(runs: list[subprocess.Popen[str]]) -> list[str]:
    """What other runs print that have all said ``ready`` before any of them goes on."""
    for run in runs:
        assert run.stdout
        assert run.stdout.readline() == "ready\n"
    for run in runs:
        assert run.stdin
        run.stdin.write("\n")
        run.stdin.flush()
    return [run.communicate(timeout=60)[0].strip() for run in runs]


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
    names = set(told_at_once(runs))
    assert names == {"job", "job.2", "job.3", "job.4", "job.5", "job.6"}


def test_a_file_in_the_place_of_the_base_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(UsageError, match=f"--log-dir {path}: is a file"):
        run_folder.create(path, "run")
    with pytest.raises(OSError, match="Not a directory"):
        run_folder.create(path / "below", "run")


def test_the_default_follows_the_xdg_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question is what the environment has."""
    monkeypatch.setenv("HOME", "/home/ada")
    golden.check_answers("default_folders", lambda text: run_folder.default_base(dict([text.split("=")])))


def test_a_user_without_a_home_gets_a_private_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    base = run_folder.default_base({})
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    assert base.parent == tmp_path


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


# Where every node has a launcher.


def launchers_folder(base: Path, run_id: str, run_key: str, *names: str) -> Path:
    return run_folder.move_into_run(run_folder.create(base, f"{run_id}.{names[0]}"), run_id, run_key, names)


def test_the_launchers_of_one_run_meet_in_one_folder(tmp_path: Path) -> None:
    first = launchers_folder(tmp_path, "job7", "k1", "gpu1")
    second = launchers_folder(tmp_path, "job7", "k1", "gpu2")
    assert (first, second) == (tmp_path / "job7" / "gpu1", tmp_path / "job7" / "gpu2")
    assert [path.name for path in tmp_path.iterdir()] == ["job7"]
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert run_folder.of_launchers(tmp_path / "job7") == (first, second)


def test_two_runs_of_one_id_never_share_a_folder(tmp_path: Path) -> None:
    order = (("k1", "gpu1"), ("k1", "gpu2"), ("k2", "gpu1"), ("k2", "gpu2"), ("k1", "gpu3"))
    paths = [launchers_folder(tmp_path, "job7", run_key, host) for run_key, host in order]
    names = {"k1": "job7", "k2": "job7.2"}
    assert paths == [tmp_path / names[run_key] / host for run_key, host in order]
    assert run_folder.create(tmp_path, "job7").name == "job7.3"


def test_a_launcher_that_comes_again_to_its_run_has_another_folder(tmp_path: Path) -> None:
    paths = [launchers_folder(tmp_path, "job7", "k", "gpu1", "gpu1.3") for _ in range(3)]
    assert [path.name for path in paths] == ["gpu1", "gpu1.3", "gpu1.3.2"]


def test_what_is_no_folder_of_the_run_is_passed_over(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / run_folder.NODES).write_text("k")
    base = tmp_path / "base"
    run_folder.create(base, "job7")
    (base / "job7.2").symlink_to(elsewhere)
    (base / "job7.3").write_text("a file")
    (base / "job7.4").mkdir()
    (base / "job7.4" / "mine").touch()
    (base / "job7.5").symlink_to(tmp_path / "missing")
    base.chmod(0o1777)
    assert launchers_folder(base, "job7", "k", "gpu1") == base / "job7.6" / "gpu1"
    assert not [path for path in base.iterdir() if path.name.startswith(".")]


def test_launchers_that_meet_at_once_find_one_folder(tmp_path: Path) -> None:
    code = (
        "from ddplaunch.system.files.run_folder import move_into_run;"
        "mine = create(pathlib.Path(sys.argv[1]), 'job7.host');"
        "print('ready', flush=True); input(); print(move_into_run(mine, 'job7', sys.argv[2], (sys.argv[3],)))"
    )
    runs = [other_run(code, tmp_path, key, f"gpu1.{rank}") for rank in range(3) for key in ("k1", "k2")]
    paths = [Path(path) for path in told_at_once(runs)]
    assert [path.name for path in paths] == [f"gpu1.{rank}" for rank in (0, 0, 1, 1, 2, 2)]
    assert {path.parent.name for path in paths[::2]} | {path.parent.name for path in paths[1::2]} == {"job7", "job7.2"}
    assert len({path.parent for path in paths[::2]}) == len({path.parent for path in paths[1::2]}) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"job7", "job7.2"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_launcher_does_not_use_another_users_folder(tmp_path: Path) -> None:
    launchers_folder(tmp_path, "job7", "k", "gpu1")
    os.chown(tmp_path / "job7", 65534, 65534)
    tmp_path.chmod(0o1777)
    assert launchers_folder(tmp_path, "job7", "k", "gpu2") == tmp_path / "job7.2" / "gpu2"


def test_a_lock_is_given_up_with_the_run(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with run_folder.released(run_folder.create(tmp_path, "run")):
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    assert os.listdir("/proc/self/fd") == before


def test_a_folder_that_was_moved_is_found_by_its_lock_and_a_deleted_one_is_not(tmp_path: Path) -> None:
    folder = run_folder.create(tmp_path, "job7")
    assert run_folder.moved_to(folder) is None
    (tmp_path / "new").mkdir()
    moved = folder.rename(tmp_path / "new" / "mine")
    assert run_folder.moved_to(folder) == moved
    shutil.rmtree(moved)
    assert run_folder.moved_to(folder) is None
    with run_folder.released(folder):
        pass


def test_a_lock_is_seen_where_it_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder.create(tmp_path, "job7")
    open_file = os.open

    def read_only(path: str, flags: int, *more: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EROFS, "read-only")
        return open_file(path, flags, *more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", read_only)
        assert run_folder.is_locked(folder)
    with run_folder.released(folder):
        pass
    assert not run_folder.is_locked(folder)
