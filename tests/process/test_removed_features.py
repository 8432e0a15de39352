"""A feature is a folder and a line: without them, everything else works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch.cli.options import ROWS
from ddplaunch.features import FEATURES
from tests.support.runs import environment

PACKAGE = Path(ddplaunch.__file__).parent
RESTARTS = """
import os, sys
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1" else 0)
"""
IMPORT_CORE = """
import importlib, pkgutil, sys, ddplaunch
for module in pkgutil.walk_packages(ddplaunch.__path__, "ddplaunch."):
    if not module.name.startswith("ddplaunch.features.") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def without(name: str) -> set[str]:
    """The feature, and those that need it."""
    gone = {name}
    while more := {each.name for each in FEATURES if gone & {*each.needs}} - gone:
        gone |= more
    return gone


def options_of(features: set[str]) -> set[str]:
    return {row.long_name for row in ROWS if row.feature in features}


def copy_without(removed: set[str], target: Path) -> Path:
    """The package without these folders and lines; files are links, so that nothing is compiled again."""
    skip = {str(PACKAGE / "features" / name) for name in removed}
    ignore = lambda folder, names: [name for name in names if os.path.join(folder, name) in skip]  # noqa: E731
    copy = shutil.copytree(PACKAGE, target / "ddplaunch", copy_function=os.link, ignore=ignore)
    listed = copy / "features" / "__init__.py"
    lines = "|".join(rf'    Feature\("{name}"[^\n]*\n' for name in removed)
    text, count = re.subn(lines, "", listed.read_text())
    assert count == len(removed)
    listed.unlink()  # A link to the original.
    listed.write_text(text)
    return target


def run_copy(folder: Path, *arguments: str | Path, code: str = "") -> subprocess.CompletedProcess[str]:
    code = code or "from ddplaunch.__main__ import main; main()"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=folder, timeout=60, check=False
    )


EACH = [each.name for each in FEATURES]


@pytest.mark.parametrize("removed", [*([name] for name in EACH), EACH], ids="-".join)
def test_a_job_fails_restarts_and_succeeds_without_the_feature(removed: list[str], tmp_path: Path) -> None:
    gone = set().union(*map(without, removed))
    folder = copy_without(gone, tmp_path)
    script = tmp_path / "train.py"
    script.write_text(RESTARTS)
    done = run_copy(folder, "--nproc-per-node", "2", "--max-restarts", "1", script)
    assert (done.returncode, done.stdout.count("attempt 1")) == (0, 2), done.stderr
    assert "attempt 0" in done.stdout, "rank 0 may be stopped before it prints"
    shown = run_copy(folder, "--help")
    assert shown.returncode == 0, shown.stderr
    offered = {*re.findall(r"^  (?:-\w )?(--[a-z-]+)", shown.stdout, re.MULTILINE)}
    assert "--max-restarts" in offered
    assert not offered & options_of(gone)
    imported = run_copy(folder, code=f"exec({IMPORT_CORE!r})")
    assert imported.returncode == 0, imported.stderr
