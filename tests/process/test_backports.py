"""A module of PyPI that has the name of one of the standard library, beside ddplaunch, changes nothing."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.runs import PROGRAMS, ROOT

BROKEN = "raise ImportError('written for Python 2')\n"


@pytest.fixture
def environment_with_backports(tmp_path: Path) -> Path:
    """A virtual environment whose site-packages have ``pathlib`` and ``enum34``."""
    folder = tmp_path / "env"
    venv.create(folder, symlinks=True)
    site = _site(folder)
    for name in ("pathlib", "enum", "typing", "queue"):
        (site / f"{name}.py").write_text(BROKEN)
    # The packages that ddplaunch needs are those of the tests' environment.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def _site(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))


def _run(folder: Path, cwd: Path, start_method: str) -> subprocess.CompletedProcess[str]:
    python = folder / "bin" / "python"
    script = [PROGRAMS / "exit_with.py", "*=code:7"]
    command = [python, "-m", "ddplaunch", "--start-method", start_method, "--nproc-per-node", "1", *script]
    return subprocess.run(command, cwd=cwd, env=dict(os.environ), capture_output=True, text=True, timeout=60)


def test_an_installed_ddplaunch_runs_beside_backports(
    environment_with_backports: Path, start_method: str, tmp_path: Path
) -> None:
    (_site(environment_with_backports) / "ddplaunch").symlink_to(ROOT / "ddplaunch")
    finished = _run(environment_with_backports, tmp_path, start_method)
    assert finished.returncode == 7, finished.stderr


def test_a_checkout_runs_its_code_in_every_process_while_another_ddplaunch_is_installed(
    environment_with_backports: Path, start_method: str
) -> None:
    other = _site(environment_with_backports) / "ddplaunch"
    other.mkdir()
    (other / "__init__.py").write_text(BROKEN)
    finished = _run(environment_with_backports, ROOT, start_method)
    assert finished.returncode == 7, finished.stderr
