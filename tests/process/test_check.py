"""--check on this machine: what is here, a worker that uses torch, and nothing of the user's is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import fake_nvml
from tests.support.runs import PROGRAMS, run

CHECK_WARNED, NODE_NOT_READY, HARDWARE = 81, 82, 88


@pytest.mark.torch
def test_this_machine_is_looked_at_and_a_worker_runs_and_a_sick_gpu_is_found_as_at_a_start(
    nvml_library: Path, tmp_path: Path
) -> None:
    """A check that finds no more than warnings: test_search_path.py."""
    fake_nvml.say(says := tmp_path / "says", "gpus 2", "1 name Fake H100", "1 rows 0 0 0 1")
    env = {"LD_LIBRARY_PATH": str(nvml_library), "FAKE_NVML": str(says)}
    (folder := tmp_path / "here").mkdir()
    finished = run("--check", "--deep", PROGRAMS / "exit_with.py", "0=7", cwd=folder, env=env)
    head, row, imports, health, *warnings = finished.out.splitlines()
    assert re.split(r"\s{2,}", head)[:3] == ["hosts", "Python", "torch"]
    assert re.search(r" \d+\.\d+\.\d+ .* free +\S+", row)
    assert re.fullmatch(r"import torch: [\d.]+ s( at first, [\d.]+ s again)?, from \S+ at /.*", imports)
    assert health.startswith("health: ")
    assert all(line.startswith("warning: ") for line in warnings)  # Machines differ in what there is to warn of.
    assert finished.returncode == HARDWARE, finished.err
    text = r"^warning: \S+: no GPU was measured: torch \S+ finds no GPU that it can use$"
    assert any(re.match(text, line) for line in warnings), finished.out
    line = r"^warning: \S+: GPU 1 \(GPU-0000-1\): a row of its memory could not be remapped \(.*\)$"
    assert re.search(line, finished.out, re.MULTILINE)
    assert re.search(r"^ddplaunch: jobs do not use \S+ \(--health\)$", finished.err, re.MULTILINE)
    assert not list(folder.iterdir())


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
