"""A transport is a class and a row: runs, queries and the plan then know it."""

from __future__ import annotations

from pathlib import Path

from tests.support import runs

PROGRAM = Path(runs.__file__).parent / "programs" / "shell_transport.py"


def test_a_class_and_a_row_are_a_transport(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    done = runs.python(PROGRAM, script, tmp_path / "logs")
    assert done.returncode == 0, done.err
    assert "on 2 nodes, started through a shell" in done.out
    assert "on each node  through a shell: " in done.out
    assert "[one:0] rank 0 of 2" in done.out
    assert "[two:1] rank 1 of 2" in done.out
