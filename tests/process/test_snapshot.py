"""With --snapshot a run keeps its code, whatever is edited: in all attempts, processes, and ways to start a worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.process.test_full_disk import Disk
from tests.support.processes import wait_until
from tests.support.repositories import git, repository
from tests.support.runs import environment, meeting, python, run, start

TRAIN = """
import os, pathlib, sys
here = pathlib.Path("lib/model.py")  # In the working directory, where the user edits it.
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0:
    here.write_text("VERSION = 'edited'")
    sys.exit(1)
import lib.model, package.inside
print("runs", lib.model.VERSION, package.inside.VERSION, pathlib.Path("data/x").read_text(), os.getcwd())
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    versions = {path: "VERSION = 'first'" for path in ("lib/model.py", "src/package/inside.py")}
    files = {
        "train.py": TRAIN,
        ".gitignore": "data\n",
        "lib/__init__.py": "",
        "src/package/__init__.py": "",
        **versions,
    }
    folder = repository(tmp_path / "my project", files)
    (folder / "data").mkdir()
    (folder / "data/x").write_text("data")
    return folder


@pytest.mark.parametrize("how", [("train.py",), ("-m", "train"), ("--start-method", "spawn", "-m", "train")])
def test_a_restart_runs_the_code_with_which_the_run_has_begun(root: Path, tmp_path: Path, how: tuple[str, ...]):
    env = environment({"PYTHONPATH": os.pathsep.join((environment()["PYTHONPATH"], str(root / "src")))})
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--snapshot", "--log-dir", tmp_path / "logs")
    finished = run(*options, *how, env={"PYTHONPATH": env["PYTHONPATH"]}, cwd=root)
    assert finished.returncode == 0, finished.err
    assert finished.out.count(f"runs first first data {root}") == 2
    code = finished.report["code"]
    commit = git(root, "rev-parse", "HEAD")
    assert {**code, "folder": ""} == {
        "folder": "", "root": str(root), "commit": commit, "branch": "main", "modified": 0, "untracked": 0,
    }  # fmt: skip
    assert os.readlink(finished.run_dir / "code") == code["folder"]
    assert f"a snapshot of {root}: commit {commit[:12]} (main), 0 files modified, 0 untracked" in finished.err
    assert "what is no code" not in finished.err


DELETES = """
import os, shutil, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    shutil.rmtree(os.getcwd())
    sys.exit(1)
import lib.model
print("runs", lib.model.VERSION)
"""


@pytest.mark.parametrize("how", [("train.py",), ("--start-method", "spawn", "train.py")])
def test_a_restart_runs_the_code_though_all_of_it_was_deleted(root: Path, tmp_path: Path, how: tuple[str, ...]):
    (root / "train.py").write_text(DELETES)
    finished = run("--max-restarts", "1", "--snapshot", "--log-dir", tmp_path / "logs", *how, cwd=root)
    assert "runs first" in finished.out, finished.err
    assert finished.returncode == 0


def test_folders_that_the_script_adds_to_the_path_are_those_of_the_snapshot(root: Path, tmp_path: Path):
    (root / "scripts").mkdir()
    adds = "sys.path += ['.', 'src', str(pathlib.Path.cwd()), '/usr/none']"
    imports = "import lib.model, package.inside; print('runs', lib.model.__file__, package.inside.__file__)"
    (root / "scripts/train.py").write_text(f"import sys, pathlib; {adds}; {imports}")
    finished = run("--snapshot", "--log-dir", tmp_path / "logs", "scripts/train.py", cwd=root)
    folder = finished.report["code"]["folder"]
    assert f"runs {folder}/lib/model.py {folder}/src/package/inside.py" in finished.out, finished.err


def test_a_package_that_is_installed_to_be_edited_is_that_of_the_snapshot(root: Path, tmp_path: Path):
    """As setuptools writes it: a finder with a mapping, which a .pth file installs."""
    site = tmp_path / "site"
    site.mkdir()
    finder = f"MAPPING = {{'package': {str(root / 'src/package')!r}}}\n" + FINDER
    (site / "__editable___package_finder.py").write_text(finder)
    (site / "sitecustomize.py").write_text("import __editable___package_finder as found; found.install()")
    (root / "train.py").write_text("import package.inside; print('runs', package.inside.__file__)")
    paths = os.pathsep.join((str(site), environment()["PYTHONPATH"]))
    finished = run("--snapshot", "--log-dir", tmp_path / "logs", "train.py", env={"PYTHONPATH": paths}, cwd=root)
    assert f"runs {finished.report['code']['folder']}/src/package/inside.py" in finished.out, finished.err


FINDER = """
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in MAPPING:
            return spec_from_file_location(name, MAPPING[name] + "/__init__.py")
def install():
    sys.meta_path.append(Finder())
"""


def test_what_was_preloaded_from_the_code_itself_is_refused(root: Path, tmp_path: Path):
    (root / "train.py").write_text("print('runs')")
    paths = os.pathsep.join((environment()["PYTHONPATH"], str(root / "src")))
    options = ("--snapshot", "--log-dir", tmp_path / "logs", "--preload", "package")
    finished = run(*options, "train.py", env={"PYTHONPATH": paths}, cwd=root)
    assert finished.returncode != 0
    assert f"--preload has imported package from {root}/src/package/__init__.py, not from the snapshot" in finished.err


def test_a_snapshot_is_taken_when_a_job_is_submitted_and_run_when_it_starts(root: Path, tmp_path: Path):
    logs = ("--log-dir", tmp_path / "logs")
    (root / "train.py").write_text("from lib import model; print('runs', model.VERSION)")
    taken = run("--take-snapshot", "--snapshot-include", "data", *logs, "train.py", cwd=root)
    assert taken.returncode == 0, taken.err
    folder = taken.out.strip()
    assert not (root / folder / "data").is_symlink()
    (root / "lib/model.py").write_text("VERSION = 'edited while the job waits'")
    for options, env in ((("--use-snapshot", folder), {}), (("--snapshot",), {"DDPLAUNCH_SNAPSHOT": folder})):
        finished = run(*options, *logs, "train.py", env=env, cwd=root)
        assert "runs first" in finished.out, finished.err
        assert finished.report["code"]["folder"] == folder
    diff = run("--snapshot", *logs, "train.py", cwd=root).run_dir / "code.diff"
    assert "+VERSION = 'edited while the job waits'" in diff.read_text()


WAITS = """
import os, pathlib, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    pathlib.Path("lib/model.py").write_text("edited")
    pathlib.Path("note.txt").write_text("not of git, and no module")
    sys.exit(1)
while not pathlib.Path("go.txt").exists():
    time.sleep(0.02)
"""


def test_without_a_snapshot_a_restart_says_which_code_has_changed(root: Path, tmp_path: Path):
    (root / "train.py").write_text(WAITS)
    running = start("--max-restarts", "1", "--log-dir", tmp_path / "logs", "train.py", cwd=root)
    running.wait_for(r"and attempt 1 runs it as it is now: lib/model\.py; --snapshot keeps the code of a run")
    (root / "go.txt").touch()
    assert running.finish().returncode == 0


def test_what_workers_leave_in_the_snapshot_is_told(root: Path, tmp_path: Path):
    (root / "train.py").write_text("import pathlib; pathlib.Path(__file__).with_name('out').mkdir()")
    finished = run("--snapshot", "--log-dir", tmp_path / "logs", "train.py", cwd=root)
    assert "the snapshot has what is no code, which runs of other code do not find: out/ in" in finished.err


def test_nodes_with_launchers_of_their_own_are_told_if_they_do_not_run_the_same_code(root: Path, tmp_path: Path):
    git(tmp_path, "clone", "--quiet", str(root), "other")
    (tmp_path / "other/lib/model.py").write_text("VERSION = 'other'")
    wait = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"
    where = meeting()
    for folder in (root, tmp_path / "other"):
        (folder / "train.py").write_text(wait)
    options = (*where, "--nnodes", "2", "--nproc-per-node", "1", "--snapshot", "--log-dir", tmp_path / "logs")
    nodes = [start(*options, "train.py", tmp_path / "go", cwd=folder) for folder in (root, tmp_path / "other")]
    told = "the nodes do not run the same code: "
    wait_until(lambda: any(told in line for node in nodes for line in node.error_lines))
    (tmp_path / "go").touch()
    finished = [node.finish() for node in nodes]
    assert [each.returncode for each in finished] == [0, 0]
    assert sum(each.err.count(told) for each in finished) == 1


def test_a_full_disk_and_a_folder_that_cannot_be_written_are_one_message_before_the_run(root: Path, tmp_path: Path):
    disk = Disk(tmp_path / "disk")
    (root / "big.bin").write_bytes(os.urandom(2 << 20))
    for options, problem in (("size=1m", "No space left on device"), ("size=1m,ro", "Read-only file system")):
        finished = disk.run(options, "--snapshot", root / "train.py")
        assert finished.returncode == 82, finished.err
        said = finished.err.splitlines()
        assert said[0].startswith("ddplaunch: error: --snapshot: /")
        assert problem in said[0]
        assert len(said) == 2, said  # The second says what to do.


def test_a_function_is_not_run_from_a_snapshot(tmp_path: Path):
    (tmp_path / "program.py").write_text(
        "import ddplaunch\ndef work(): pass\nif __name__ == '__main__': ddplaunch.launch(work, snapshot=True)"
    )
    assert "--snapshot: not for a function" in python("program.py", cwd=tmp_path).err
