"""Run folders are kept for 30 days and up to 5 GB, or the newest N; nothing that goes on or is not ours is deleted."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ddplaunch.config import OutputConfig
from ddplaunch.features.keep_runs import agent, retention
from ddplaunch.features.keep_runs.retention import prune
from ddplaunch.system.files import run_folder
from tests.support import golden, runs
from tests.support.configs import agent_spec

DAY_S = 86400.0
PRUNE = """
import sys, pathlib
from ddplaunch.features.keep_runs.retention import prune
prune(pathlib.Path(sys.argv[1]), 20)
"""
CREATE = """
import sys, pathlib
from ddplaunch.system.files.run_folder import create, move_into_run
mine = create(pathlib.Path(sys.argv[1]), 'old')
print(move_into_run(mine, 'job7', 'k', ('gpu2',)) if sys.argv[2:] else mine, flush=True)
input()
"""


class Folders:
    """The folder with those of the runs. Its methods are the steps of a story."""

    def __init__(self, base: Path, patch: pytest.MonkeyPatch) -> None:
        self.base, self._patch = base, patch
        self.said: list[str] = []

    def run(self, name: str, days: str = "1", outcome: str = "succeeded", duration_s: str = "3600") -> None:
        """A run that has ended ``days`` ago, with files of 100 kB; of ``RUN/HOST`` the part of a launcher."""
        folder = self.base / name
        (folder / "attempt_0" / "0").mkdir(parents=True)
        (folder / "attempt_0" / "0" / "stdout.log").write_bytes(bytes(100_000))
        (folder / run_folder.LOCK).touch()
        if outcome != "killed":
            (folder / "report.json").write_text(json.dumps({"outcome": outcome, "duration_s": float(duration_s)}))
        if "/" in name:
            (folder.parent / run_folder.NODES).write_text("key")
        for path in folder.iterdir():
            os.utime(path, (time.time() - float(days) * DAY_S,) * 2)

    def runs(self, name: str, count: str, days: str = "1") -> None:
        """So many runs, or launchers of one; the first is the oldest."""
        for number in range(int(count)):
            self.run(f"{name}{number}", str(float(days) - number / 1000))

    def limit(self, nbytes: str) -> None:
        self._patch.setattr(retention, "KEEP_BYTES", int(nbytes))

    def hour(self) -> None:
        """An hour passes."""
        stamp = self.base / retention._STAMP
        os.utime(stamp, (stamp.stat().st_mtime - 3601,) * 2)

    def elsewhere(self, name: str) -> None:
        """The launcher was on another machine, whose locks are not seen, and has not reported."""
        (self.base / name / run_folder.LOCK).write_text("another\n")
        (self.base / name / "report.json").unlink()

    def reports(self, name: str) -> None:
        (self.base / name / "report.json").touch()

    def begun(self, name: str, age_s: str) -> None:
        """The first launcher of a run is about to move its folder into it."""
        (self.base / name).mkdir()
        (self.base / name / run_folder.NODES).write_text("key")
        os.utime(self.base / name / run_folder.NODES, (time.time() - float(age_s),) * 2)

    def no_locks(self) -> None:
        """The file system has none."""

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSYS, "Function not implemented")

        self._patch.setattr(fcntl, "flock", fail)

    def full(self) -> None:
        """The disk has no room for the time stamp."""

        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        self._patch.setattr("pathlib.Path.touch", fail)

    def prune(self, keep_runs: str = "") -> None:
        prune(self.base, int(keep_runs) if keep_runs else None)
        left = sorted(path.name for path in self.base.iterdir() if path.is_dir())
        self.said.append(" ".join(left) or "nothing is left")


def test_what_is_kept(tmp_path: Path) -> None:
    def story(text: str) -> str:
        base = tmp_path / text.partition(": ")[0]
        base.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            return golden.play(Folders(base, patch), text.partition(": ")[2])

    golden.check_pages("kept_runs", story)


def test_what_is_not_ours_is_never_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders, elsewhere = Folders(tmp_path / "base", monkeypatch), Folders(tmp_path / "elsewhere", monkeypatch)
    elsewhere.run("precious", "99")
    folders.run("linked", "99")
    (folders.base / "linked" / "data").symlink_to(elsewhere.base / "precious")
    (folders.base / "notes").mkdir()
    (folders.base / "notes" / "notes.txt").write_text("mine")
    (folders.base / "file").write_text("mine")
    (folders.base / "link").symlink_to(elsewhere.base / "precious")
    prune(folders.base, 0)
    assert (elsewhere.base / "precious" / "attempt_0" / "0" / "stdout.log").exists()
    assert {path.name for path in folders.base.iterdir()} == {"notes", "file", "link"}


def test_pruning_passes_over_what_it_cannot_read(tmp_path: Path) -> None:
    prune(tmp_path / "missing", None)
    (tmp_path / "file").touch()
    prune(tmp_path / "file", 20)


@contextmanager
def other_run(*arguments: object) -> Iterator[Path]:
    """A run that goes on in the block, in another process; its folder."""
    with subprocess.Popen(
        [sys.executable, "-c", CREATE, *map(str, arguments)],
        cwd=runs.ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as run:
        assert run.stdout
        yield Path(run.stdout.readline().strip())
        run.communicate("\n", timeout=60)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_run_that_goes_on_is_kept_however_old_it_is(
    tmp_path: Path, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if only one of its launchers goes on."""
    if is_shared:
        Folders(tmp_path, monkeypatch).run("job7/gpu1")
        (tmp_path / "job7" / run_folder.NODES).write_text("k")
    with other_run(tmp_path, *(["job7"] if is_shared else [])) as folder:
        os.utime(folder / run_folder.LOCK, (1, 1))
        prune(tmp_path, 0)
        assert folder.is_dir()
        assert not is_shared or (tmp_path / "job7" / "gpu1").is_dir()
    prune(tmp_path, 0)
    assert list(tmp_path.iterdir()) == [], "it ended, however it did, so nothing holds it any more"


def test_two_runs_that_prune_at_once_do_not_get_into_each_others_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Folders(tmp_path, monkeypatch).runs("run", "120")
    pruning = [subprocess.Popen([sys.executable, "-c", PRUNE, str(tmp_path)], cwd=runs.ROOT) for _ in range(3)]
    assert [process.wait(60) for process in pruning] == [0, 0, 0]
    assert {path.name for path in tmp_path.iterdir()} == {f"run{number}" for number in range(100, 120)}


def test_a_node_deletes_in_the_default_folder_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Folders(tmp_path, monkeypatch).run("old", "2")
    Folders(tmp_path, monkeypatch).run("new", "1")
    output = OutputConfig(keep_runs=1)
    node_dir = tmp_path / "new" / "gpu1"
    for spec in (
        agent_spec(output=replace(output, log_dir=str(tmp_path)), run_dir_name="new", node_dir=str(node_dir)),
        agent_spec(output=output, run_dir_name="", node_dir=str(node_dir)),
        agent_spec(output=output, run_dir_name="new", node_dir=None),
    ):
        agent.begin(spec, print)
    assert (tmp_path / "old").exists()
    agent.begin(agent_spec(output=output, run_dir_name="new", node_dir=str(node_dir)), print)
    assert {path.name for path in tmp_path.iterdir()} == {"new"}


def test_a_run_deletes_old_folders_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "ddplaunch"
    Folders(base, monkeypatch).runs("run", "3", "9")
    assert runs.run("--no-python", "--keep-runs", "2", "true", env={"XDG_STATE_HOME": str(tmp_path)}).returncode == 0
    assert len(list(base.iterdir())) == 2
    assert (base / "run2").exists()
