"""The script ``-``: a program from stdin, which all workers of all nodes run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import Finished, run

PROGRAM = b"""import os, sys
file = getattr(sys.modules["__main__"], "__file__", None)
print(os.environ["RANK"], sys.argv, repr(sys.path[0]), file, repr(sys.stdin.read()))
if sys.argv[2:]:
    raise ValueError(os.environ["RANK"])
"""


def job(tmp_path: Path, program: bytes, *arguments: str, env: dict[str, str] | None = None) -> Finished:
    (tmp_path / "program").write_bytes(program)
    with open(tmp_path / "program", "rb") as stdin:
        return run(*arguments, stdin=stdin, env=env)


def test_all_workers_run_the_program_as_python_does(start_method: str, tmp_path: Path):
    finished = job(tmp_path, PROGRAM, "--nproc-per-node", "2", "--start-method", start_method, "-", "a")
    assert finished.returncode == 0, finished.err
    plain = subprocess.run(
        [sys.executable, "-", "a"], input=PROGRAM, env={"RANK": "R"}, capture_output=True, check=True
    )
    said = {line.partition("] ")[2] for line in finished.out.splitlines()}
    assert said == {plain.stdout.decode().strip().replace("R", rank, 1) for rank in "01"}


def test_all_nodes_run_it_and_again_after_a_restart(tmp_path: Path):
    options = ("--dry-run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1")
    program = b"import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': 1 / 0\nprint('rank', os.environ['RANK'])"
    finished = job(tmp_path, program, *options, "-")
    assert finished.returncode == 0, finished.err
    assert sorted(line.partition("] ")[2] for line in finished.out.splitlines()) == ["rank 0", "rank 1"]


def test_its_exception_is_one_of_stdin(tmp_path: Path):
    finished = job(tmp_path, PROGRAM, "--nproc-per-node", "1", "-", "a", "b")
    assert finished.returncode == 1
    assert 'File "<stdin>", line 5, in <module>' in finished.err
    assert "bootstrap.py" not in finished.err


@pytest.mark.parametrize(
    ("program", "env", "message"),
    [
        (b"", {}, "error: -: stdin has no program"),
        (b"pass", {"PYTHON_EXEC": "/usr/bin/env"}, "error: -: PYTHON_EXEC cannot run a program from stdin"),
    ],
)
def test_what_cannot_be_run_is_a_usage_error(tmp_path: Path, program: bytes, env: dict[str, str], message: str):
    finished = job(tmp_path, program, "-", env=env)
    assert finished.returncode == 2
    assert message in finished.err
