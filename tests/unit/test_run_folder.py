"""A run's folder is private and its own; where each node has a launcher, it is in one that they share."""

from __future__ import annotations

import itertools
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


class Base:
    """A folder with those of runs, in which others may write, too. The methods are the steps of a story."""

    def __init__(self, base: Path) -> None:
        (base / "elsewhere").mkdir(parents=True)
        self.base, self.said = base / "base", list[str]()
        self.base.mkdir()

    def _say(self, path: Path) -> None:
        assert not path.exists() or stat.S_IMODE(path.stat().st_mode) == 0o700
        self.said.append(f"{path.relative_to(self.base)}{'' if path.exists() else ', which cannot be made'}")

    def create(self, run_id: str) -> None:
        """A launcher makes the folder of its run."""
        self._say(run_folder.create(self.base, run_id))

    def share(self, host: str, run_id: str) -> None:
        """A node of another launcher makes its own."""
        self._say(run_folder.share(self.base, run_id, host))

    def join(self, run_id: str, run_key: str, *names: str) -> None:
        """A launcher of a node moves its folder into that of the run."""
        made = run_folder.create(self.base, f"{run_id}.{names[0]}")
        moved = run_folder.move_into_run(made, run_id, run_key, names)
        assert stat.S_IMODE(moved.parent.stat().st_mode) == 0o700
        self._say(moved)

    def file(self, name: str) -> None:
        (self.base / name).parent.mkdir(exist_ok=True)
        (self.base / name).write_text("k")

    def folder(self, name: str) -> None:
        (self.base / name).mkdir(parents=True)

    def link(self, name: str) -> None:
        """To a folder that looks like one of a run, elsewhere."""
        (self.base.parent / "elsewhere" / run_folder.NODES).write_text("k")
        (self.base / name).symlink_to(self.base.parent / "elsewhere")

    def dangling(self, name: str) -> None:
        (self.base / name).symlink_to(self.base / "missing")

    def public(self) -> None:
        """Others may write in the folder of all runs."""
        self.base.chmod(0o1777)

    def foreign(self, name: str) -> None:
        """The folder is another user's."""
        os.chown(self.base / name, 65534, 65534)

    def left(self) -> None:
        self.said.append(" ".join(sorted(path.name for path in self.base.iterdir())))
        self.said += [f"elsewhere: {path.name}" for path in (self.base.parent / "elsewhere").iterdir()]


def check_stories(name: str, tmp_path: Path) -> None:
    numbers = itertools.count()

    def story(text: str) -> str:
        return golden.play(Base(tmp_path / str(next(numbers))), text.partition(": ")[2])

    golden.check_pages(name, story)


def test_which_folder_a_run_and_its_nodes_have(tmp_path: Path) -> None:
    check_stories("run_folders", tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_not_used(tmp_path: Path) -> None:
    check_stories("foreign_folders", tmp_path)


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
