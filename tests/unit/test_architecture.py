"""Imports go one way, heavy packages stay where they belong, and what the user waits for loads no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

import ddplaunch

PACKAGE = Path(ddplaunch.__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

HOMES = {
    "click": ("cli*.py",),
    "torch": ("rendezvous/*", "worker/*"),
    "psutil": ("agent/*",),
    "paramiko": ("launcher/ssh*.py",),
}
"""Every package that is not the standard library's or ours, and the only files that may import it."""

PARTS = ("launcher", "agent", "rendezvous", "worker")
"""They run in processes of their own and talk in records; each may import the shared modules at the top, and itself."""

STARTERS = {"cli.py": "launcher", "__init__.py": "launcher"}
"""Shared modules that may know a part."""


def imports(file: Path) -> Iterator[str]:
    """Full names of all that is imported anywhere in ``file``, also in functions and for types only."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_imports_only_what_its_place_allows(file: Path) -> None:
    own = file.parts[0] if len(file.parts) > 1 else STARTERS.get(file.name, "")
    for name in imports(file):
        package, _, rest = name.partition(".")
        if package == "ddplaunch":
            part = rest.split(".")[0]
            assert part not in PARTS or part == own, f"{file} imports {name}"
        elif package not in sys.stdlib_module_names:
            assert any(fnmatch(str(file), home) for home in HOMES.get(package, ())), f"{file} imports {name}"


def loaded_by(*modules: str) -> set[str]:
    """Top-level packages that are in memory when a fresh interpreter has imported ``modules``."""
    code = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    return set(done.stdout.split())


def dotted(file: Path) -> str:
    return ".".join(("ddplaunch", *file.with_suffix("").parts)).removesuffix(".__init__")


def test_launcher_and_agent_load_no_torch() -> None:
    modules = [dotted(file) for file in FILES if file.parts[0] not in ("rendezvous", "worker", "__main__.py")]
    assert {"ddplaunch.launcher.launcher", "ddplaunch.agent.agent", "ddplaunch.cli"} <= set(modules)
    assert not loaded_by(*modules) & {"torch", "numpy"}


def test_a_part_loads_only_what_it_needs() -> None:
    assert not loaded_by("ddplaunch") & {*HOMES, "asyncio", "logging"}
    assert not loaded_by("ddplaunch.launcher.launcher") & {*HOMES}
    assert not loaded_by("ddplaunch.agent.main") & {"click", "paramiko", "torch"}
    assert not loaded_by("ddplaunch.worker.bootstrap", "ddplaunch.worker.ending") & {*HOMES}
