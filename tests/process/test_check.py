"""--check on this machine: what is here, a worker that uses torch, and nothing of the user's is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.runs import PROGRAMS, run

USAGE, CHECK_WARNED, NODE_NOT_READY = 2, 81, 82


@pytest.mark.torch
def test_this_machine_is_looked_at_and_a_worker_runs(tmp_path: Path) -> None:
    finished = run("--check", PROGRAMS / "exit_with.py", "0=7", cwd=tmp_path)
    head, row, *warnings = finished.out.splitlines()
    assert re.split(r"\s{2,}", head)[:3] == ["hosts", "Python", "torch"]
    assert re.search(r" \d+\.\d+\.\d+ .* free +\S+", row)
    assert all(line.startswith("warning: ") for line in warnings)  # Machines differ in what there is to warn of.
    assert finished.returncode == (CHECK_WARNED if warnings else 0), finished.err
    assert not list(tmp_path.iterdir())


def test_a_worker_that_cannot_use_torch_is_found(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no luck')")
    finished = run("--check", env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"})
    assert finished.returncode not in (0, CHECK_WARNED)
    assert "no luck" in finished.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope.py",), "nope.py: no such file on this node"),
        (("--no-python", "./nope"), "./nope: no such program on this node"),
    ],
)
def test_a_script_that_is_not_there_is_found(arguments: tuple[str, ...], message: str) -> None:
    finished = run("--check", *arguments)
    assert finished.returncode == NODE_NOT_READY
    assert message in finished.err
    assert "no problems found" not in finished.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dry-run",), "--check tests real nodes"),
        (("--ps",), "--check cannot be combined"),
        (("--plan",), "--check cannot be combined"),
        (
            ("--nnodes", "2", "--node-rank", "0", "--master-addr", "h"),
            "--check: one launcher must start agents on all nodes",
        ),
    ],
)
def test_what_it_cannot_mean_is_refused(arguments: tuple[str, ...], message: str) -> None:
    finished = run("--check", *arguments)
    assert finished.returncode == USAGE
    assert message in finished.err
