"""--env on this machine: uv makes the environment once, agents and workers run in it, and it is whole or not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.process.test_full_disk import Disk
from tests.support import wheels
from tests.support.processes import children, command_line, is_alive, wait_until
from tests.support.runs import ROOT, Finished, run, start

TRAIN = """
import os, sys
import demo, torch
print("runs", os.environ["RANK"], demo.VERSION, torch.__version__, sys.prefix)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a script and a requirements.txt; ``wheels`` beside it has what that names."""
    wheels.torch_wheel(tmp_path / "wheels")
    for version in ("1.0", "2.0"):
        wheels.wheel(tmp_path / "wheels", "demo", version, {"demo.py": f"VERSION = {version!r}"})
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "requirements.txt").write_text("torch\ndemo<2\n")
    return folder


def variables(root: Path, path: str = "") -> dict[str, str]:
    """Of a user who has uv, the wheels in a folder, and no network."""
    found = {"UV_FIND_LINKS": root.parent / "wheels", "UV_OFFLINE": 1, "XDG_CACHE_HOME": root.parent / "cache"}
    uv = path or str(Path(wheels.uv()).parent)
    return {**{name: str(value) for name, value in found.items()}, "PATH": f"{uv}:{wheels.path_without_uv()}"}


def with_env(root: Path, *arguments: str, path: str = "", **options: Any) -> Finished:
    env = {**variables(root, path), **options.pop("env", {})}
    return run("--env", *arguments, env={"PYTHONPATH": str(ROOT), **env}, cwd=root, **options)


def environments(root: Path) -> list[Path]:
    return sorted((root.parent / "cache/ddplaunch/environments").glob("*/"))


@pytest.mark.parametrize("how", [(), ("--start-method", "spawn")])
def test_workers_run_in_an_environment_that_is_made_once(root: Path, tmp_path: Path, how: tuple[str, ...]):
    path = str(wheels.recording_uv(tmp_path / "bin"))
    first = with_env(root, "requirements.txt", *how, "--nproc-per-node", "2", "train.py", path=path)
    assert first.returncode == 0, first.err
    (made,) = environments(root)
    assert [f"runs {rank} 1.0 stub {made}" in first.out for rank in (0, 1)] == [True, True]
    assert "made the environment of requirements.txt in " in first.err
    assert first.report["versions"]["torch"] == "2.99.0"
    calls = (tmp_path / "bin/calls").read_text()
    again = with_env(root, "requirements.txt", *how, "-v", "train.py", path=path)
    assert f"runs 0 1.0 stub {made}" in again.out
    assert f"the environment of requirements.txt is in {made}" in again.err
    assert (tmp_path / "bin/calls").read_text() == calls


def test_programs_of_the_environment_are_found_first(root: Path):
    (root / "train.py").write_text("import os, shutil, sys\nprint(shutil.which('python'), os.environ['VIRTUAL_ENV'])")
    by_python = with_env(root, "requirements.txt", "train.py")
    (made,) = environments(root)
    assert f"{made}/bin/python {made}" in by_python.out, by_python.err
    assert f"{made}/bin/python {made}" in with_env(root, "requirements.txt", "--no-python", "python", "train.py").out


def test_two_commands_at_once_make_it_once(root: Path, tmp_path: Path):
    bin_folder = wheels.recording_uv(tmp_path / "bin", "sleep 1")
    env = {**variables(root, str(bin_folder)), "PYTHONPATH": str(ROOT)}
    running = [start("--env", "requirements.txt", "train.py", env=env, cwd=root) for _ in range(2)]
    finished = [each.finish() for each in running]
    assert [each.returncode for each in finished] == [0, 0], finished
    assert len(environments(root)) == 1
    assert (bin_folder / "calls").read_text().count("pip install") == 1


def test_other_packages_or_arguments_are_another_environment(root: Path):
    def runs(*arguments: str) -> str:
        return with_env(root, "requirements.txt", *arguments, "train.py").out

    assert "runs 0 1.0" in runs()
    (root / "constraints.txt").write_text("demo<3\n")
    (root / "requirements.txt").write_text("torch\ndemo\n-c constraints.txt\n")
    assert "runs 0 2.0" in runs()
    (root / "constraints.txt").write_text("demo<2\n")
    assert "runs 0 1.0" in runs()
    assert "runs 0 1.0" in runs("--env-args=--no-cache")
    assert len(environments(root)) == 4


def test_a_lock_file_is_installed_as_it_is_without_the_project(root: Path):
    versions = '[project]\nname = "p"\nversion = "0"\nrequires-python = ">=3.10"\ndependencies = ["torch", "demo<2"]\n'
    (root / "pyproject.toml").write_text(versions + "[tool.uv]\npackage = true\n")
    env = {**os.environ, **variables(root)}
    subprocess.run(["uv", "lock", "--python", wheels.interpreter()], cwd=root, env=env, check=True, capture_output=True)
    for name in ("uv.lock", "pyproject.toml"):
        finished = with_env(root, name, "train.py")
        assert "runs 0 1.0 stub" in finished.out, finished.err
    (root / "uv.lock").unlink()
    assert "runs 0 1.0 stub" in with_env(root, "pyproject.toml", "train.py").out
    assert [path.name.rpartition("-")[0] for path in environments(root)] == ["pyproject-toml", "uv-lock"]


def test_wheels_of_a_folder_need_no_index_and_are_all_that_there_is(root: Path):
    env = {"UV_FIND_LINKS": "", "UV_OFFLINE": "0"}
    options = ("requirements.txt", "--env-wheels", "../wheels")
    finished = with_env(root, *options, "train.py", env=env)
    assert "runs 0 1.0 stub" in finished.out, finished.err
    (root / "requirements.txt").write_text("torch\ndemo\nother\n")
    failed = with_env(root, *options, "train.py", env=env)
    assert failed.returncode == 82
    assert "other was not found in the provided package locations" in failed.err


def test_what_cannot_be_installed_is_one_message_before_any_worker_and_leaves_nothing(root: Path):
    (root / "requirements.txt").write_text("torch\ndemo>7\n")
    failed = with_env(root, "requirements.txt", "train.py")
    assert failed.returncode == 82
    assert "error: the environment of requirements.txt cannot be made on " in failed.err
    assert "uv pip ended with exit code 1\n" in failed.err
    assert "only demo<=2.0 is available" in failed.err or "demo" in failed.err
    assert "runs" not in failed.out
    assert environments(root) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("demo\n", "requirements.txt brings no torch\n  hint: Add torch to requirements.txt."),
        ("torch\n-e .\n", "-e . is a path of this machine"),
        ("torch\n-r more.txt\n", "more.txt: No such file or directory"),
    ],
)
def test_a_file_of_which_no_environment_can_be_made_is_refused(root: Path, text: str, message: str):
    (root / "requirements.txt").write_text(text)
    failed = with_env(root, "requirements.txt", "train.py")
    assert message in failed.err
    assert "runs" not in failed.out
    assert environments(root) == []


def test_without_uv_the_message_says_what_to_install(root: Path, tmp_path: Path):
    (tmp_path / "uv.py").write_text("raise ImportError\n")
    env = {"PATH": wheels.path_without_uv(), "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    failed = with_env(root, "requirements.txt", "train.py", env=env)
    assert "uv is missing, which makes environments" in failed.err
    assert "pip install uv" in failed.err


@pytest.mark.parametrize("step", ["venv", "pip"])
@pytest.mark.parametrize("whom", ["launcher", "uv"])
def test_a_kill_leaves_no_half_environment_and_no_process(root: Path, tmp_path: Path, step: str, whom: str):
    uv = wheels.recording_uv(tmp_path / "bin", '[ "$1" != "$HOLD" ] || exec sleep 300')
    env = {**variables(root, str(uv)), "PYTHONPATH": str(ROOT), "HOLD": step}
    running = start("--env", "requirements.txt", "train.py", env=env, cwd=root)
    child = wait_until(lambda: [pid for pid in children(running.pid) if command_line(pid).startswith("sleep")])[0]
    os.kill(child if whom == "uv" else running.pid, signal.SIGKILL)
    failed = running.finish()
    assert not failed.out
    assert (f"uv {step} was killed by SIGKILL" in failed.err) == (whom == "uv")
    wait_until(lambda: not is_alive(child))
    finished = with_env(root, "requirements.txt", "train.py", path=str(uv))
    assert "runs 0 1.0 stub" in finished.out, finished.err


def test_ctrl_c_ends_the_command_at_once_and_what_takes_long_is_shown(root: Path, tmp_path: Path):
    uv = wheels.recording_uv(tmp_path / "bin", '[ "$1" != pip ] || exec sh -c "echo Downloading torch; exec sleep 300"')
    env = {**variables(root, str(uv)), "PYTHONPATH": str(ROOT)}
    running = start("--env", "requirements.txt", "train.py", env=env, cwd=root, start_new_session=True)
    running.wait_for("ddplaunch: making the environment of requirements.txt: .*: Downloading torch")
    os.killpg(running.pid, signal.SIGINT)
    assert running.finish(10).returncode in (130, -signal.SIGINT)


def test_an_environment_that_is_damaged_is_made_anew_and_old_ones_are_deleted(root: Path):
    assert "runs 0" in with_env(root, "requirements.txt", "train.py").out
    (made,) = environments(root)
    old, half = made.with_name("old-1"), made.with_name("half-1")
    old.mkdir()
    marker = old / ".ddplaunch-environment.json"
    marker.write_text(json.dumps({"packages": []}))
    half.mkdir()
    os.utime(marker, (0, 0))
    os.utime(half, (0, 0))
    (made / "bin/python").unlink()
    assert "runs 0" in with_env(root, "requirements.txt", "train.py").out
    assert environments(root) == [made]


def test_a_folder_in_which_others_can_write_is_refused(root: Path):
    (folder := root.parent / f"shared/ddplaunch-{os.getuid()}").mkdir(parents=True)
    folder.chmod(0o777)
    failed = with_env(root, "requirements.txt", "--env-dir", "../shared", "train.py")
    assert f"{folder}: other users can write there" in failed.err
    folder.chmod(0o700)
    assert f"{folder}/environments" in with_env(root, "requirements.txt", "--env-dir", "../shared", "train.py").out


def test_a_full_disk_is_one_message(root: Path, tmp_path: Path):
    disk = Disk(tmp_path / "disk")
    failed = with_env(root, "requirements.txt", "--env-dir", str(disk.folder), "train.py", under=disk.under("size=60k"))
    assert failed.returncode == 82
    assert "No space left on device" in failed.err
    assert "Traceback" not in failed.err


def test_a_plan_makes_nothing_and_the_variable_of_the_folder_alone_has_no_effect(root: Path):
    planned = with_env(root, "requirements.txt", "--plan", "train.py")
    assert "'<Python of requirements.txt>' -u train.py" in planned.out
    assert not (root.parent / "cache").exists()
    (root / "train.py").write_text("print('runs')")
    assert run("train.py", env={"DDPLAUNCH_ENV_DIR": "/x"}, cwd=root).out == "runs\n"
