"""Which torch a test's jobs import: the real one where the promise is about it, else a stub that imports at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import environment, run

SHOW = "import sys, torch\nprint(torch.__version__ == 'stub', 'numpy' in sys.modules, hasattr(torch, 'cuda'))\n"


@pytest.mark.torch("forkserver")
def test_the_mark_can_be_for_one_start_method(start_method: str, request: pytest.FixtureRequest) -> None:
    is_stub = start_method == "spawn" and not request.config.getoption("--real-torch")
    find = [sys.executable, "-c", "import importlib.util; print(importlib.util.find_spec('torch').origin)"]
    found = subprocess.run(find, env=environment(), capture_output=True, text=True, check=True).stdout
    assert ("tests/support/stubs" in found) == is_stub


def test_other_tests_have_the_stub(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    is_stub = not request.config.getoption("--real-torch")
    (tmp_path / "show.py").write_text(SHOW)
    shown = run("--nproc-per-node", "1", tmp_path / "show.py").out
    assert shown == ("True False False\n" if is_stub else "False True True\n")
