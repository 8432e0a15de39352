"""What lies in the working directory or the script's folder is imported by the user's Python script alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT, meeting, run, start

CHECK_WARNED = 81
PLANTED = ("torch", "numpy", "random", "queue", "select", "selectors", "socket", "json", "struct")
"""Modules of a stranger in a shared folder."""

PROJECT = ("json", "queue", "select", "signal", "struct", "selectors", "platform", "socket", "threading")
"""Modules that a project may have, and that Python does not import before the program."""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder in which each module leaves a mark when it is imported."""
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path)!r} + '/imported-{name}', 'w').close()\n")
    return tmp_path


def _imported(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("imported-*"))


def test_programs_that_are_not_python_import_nothing_from_here(shared: Path) -> None:
    nodes = ("--nnodes", "2", "--nproc-per-node", "1", *meeting())
    launchers = [start(*nodes, "--no-python", "true", cwd=shared) for _ in range(2)]
    finished = [launcher.finish() for launcher in launchers]
    assert [one.returncode for one in finished] == [0, 0], finished
    assert _imported(shared) == []


def test_a_spawned_script_alone_imports_what_lies_beside_it(shared: Path) -> None:
    script = shared / "train.py"
    script.write_text("import socket\n")
    finished = run("--start-method", "spawn", "--nproc-per-node", "1", script, cwd=shared)
    assert (finished.returncode, _imported(shared)) == (0, ["imported-socket"]), finished.err


@pytest.mark.torch
def test_check_imports_nothing_from_here_and_needs_no_numpy(
    shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """torch does not bring numpy, and its collectives of objects need it."""
    path = tmp_path_factory.mktemp("path")
    (path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')")
    finished = run("--check", "--deep", cwd=shared, env={"PYTHONPATH": f"{path}:{ROOT}"})
    # Without a GPU, that none was measured is a warning.
    assert finished.returncode == CHECK_WARNED, finished.err
    assert _imported(shared) == []


@pytest.mark.parametrize("by", ["module", "PYTHONPATH"])
def test_a_project_may_have_modules_named_like_those_of_the_standard_library(tmp_path: Path, by: str) -> None:
    for name in PROJECT:
        (tmp_path / f"{name}.py").write_text("raise ImportError('of the project')\n")
    path = os.pathsep.join([*(["."] if by == "PYTHONPATH" else []), os.environ["PYTHONPATH"], str(ROOT)])
    how = ["-m", "ddplaunch"] if by == "module" else ["-c", "from ddplaunch.__main__ import main; main()"]
    command = [sys.executable, *how, "--nproc-per-node", "1", "--no-python", "true"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
