"""A feature is a folder and a line: without them, everything else works.

Several are removed at a time, so that few runs show each feature without each that it does not need.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

import ddplaunch
from ddplaunch.features import FEATURES
from ddplaunch.rows import Option
from tests.support.runs import environment

PACKAGE = Path(ddplaunch.__file__).parent
EACH = [each.name for each in FEATURES]
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


def groups() -> list[list[str]]:
    """Sets to remove: of any two features, one stays where the other is gone, unless it needs that one."""
    pairs = {(kept, gone) for gone in EACH for kept in {*EACH} - without(gone)}
    found = []
    while pairs:
        group: set[str] = set()
        while more := max((group | without(name) for name in EACH), key=lambda each: len(shown_by(each, pairs))):
            if len(shown_by(more, pairs)) <= len(shown_by(group, pairs)):
                break
            group = more
        pairs -= shown_by(group, pairs)
        found.append([name for name in EACH if name in group])
    return found


def shown_by(removed: set[str], pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(kept, gone) for kept, gone in pairs if gone in removed and kept not in removed}


def options_of(features: Collection[str]) -> set[str]:
    packages = [importlib.import_module(f"ddplaunch.features.{name}") for name in features]
    rows = (row for package in packages if hasattr(package, "rows") for row in package.rows())
    return {row.long_name for row in rows if isinstance(row, Option)}


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


def run_copy(
    folder: Path, *arguments: str | Path, code: str = "", timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    code = code or "from ddplaunch.__main__ import main; main()"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(), cwd=folder, timeout=timeout_s, check=False
    )


@pytest.mark.parametrize("removed", [*groups(), EACH], ids="-".join)
def test_a_job_fails_restarts_and_succeeds_without_the_features(removed: list[str], tmp_path: Path) -> None:
    gone = {*removed}
    folder = copy_without(gone, tmp_path)
    script = tmp_path / "train.py"
    script.write_text(RESTARTS)
    done = run_copy(folder, "--nproc-per-node", "2", "--max-restarts", "1", script)
    assert (done.returncode, done.stdout.count("attempt 1")) == (0, 2), done.stderr
    assert "attempt 0" in done.stdout, "rank 0 may be stopped before it prints"
    # A module of the core that imports a feature shows itself where there is none.
    code = f"{IMPORT_CORE if removed == EACH else ''}\nfrom ddplaunch.__main__ import main; main()"
    shown = run_copy(folder, "--help", code=code)
    assert shown.returncode == 0, shown.stderr
    offered = {*re.findall(r"^  (?:-\w, )?(--[a-z-]+)", shown.stdout, re.MULTILINE)}
    assert "--max-restarts" in offered
    assert not offered & options_of(gone)
    assert offered >= options_of({*EACH} - gone) - ({"--all", "--nodes"} if "ps" in gone else set())


def imported_by(module: str) -> set[str]:
    """The modules of features and of the tests' support that a file of tests imports, and those that these import."""
    text = Path(*module.split(".")).with_suffix(".py").read_text()
    found = {*re.findall(r"^\s*(?:from|import) (ddplaunch\.features\.\w+|tests\.support\.\w+)", text, re.MULTILINE)}
    found |= {f"tests.support.{name}" for name in re.findall(r"^from tests\.support import (\w+)", text, re.MULTILINE)}
    return found.union(*(imported_by(name) for name in found if name.startswith("tests.")))


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(600)
def test_the_unit_tests_of_the_core_pass_without_any_feature(tmp_path: Path) -> None:
    tests = PACKAGE.parent / "tests"
    copy_without({*EACH}, tmp_path)
    for folder in ("tests", "docs"):
        shutil.copytree(PACKAGE.parent / folder, tmp_path / folder, copy_function=os.link)
    for file in ("pyproject.toml", "README.md"):
        os.link(PACKAGE.parent / file, tmp_path / file)
    of_core = [
        str(file.relative_to(PACKAGE.parent))
        for file in sorted(tests.glob("unit/test_*.py"))
        if "ddplaunch" in file.read_text()
        and file.stem != "test_architecture"  # Of files, which are fewer here.
        and not any(name.startswith("ddplaunch.features.") for name in imported_by(f"tests.unit.{file.stem}"))
    ]
    assert len(of_core) > 40
    done = run_copy(
        tmp_path,
        *of_core,
        "--hypothesis-profile=few",
        code="import pytest; sys.exit(pytest.main(['-q', '-m', 'not (slow or features)', *sys.argv[1:]]))",
        timeout_s=600,
    )
    assert done.returncode == 0, done.stdout[-5000:]
