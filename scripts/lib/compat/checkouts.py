"""Gets the programs of ``programs.py``, what they import, and their data, all below ``build/compat-programs``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from programs import Program

HERE = Path(__file__).parent
ROOT = Path("build/compat-programs").absolute()
DATA = ROOT / "data"
VENV = ROOT / "venv"
"""Adds what the programs import to what this Python has."""
PYTHON = VENV / "bin" / "python"


def prepare(program: Program) -> None:
    """Make all that the program needs.

    Raises:
        subprocess.CalledProcessError: git or pip has failed; its messages are in ``stderr``.
    """
    make_venv()
    call(str(PYTHON), str(HERE / "made_up_data.py"), str(DATA))
    check_out(program)
    if program.packages and not packages(program).exists():
        pip("--no-deps", "--target", str(packages(program)), *program.packages)
    for target, made_up in program.made_up_files:
        path = source(program) / target
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(DATA / made_up, path)


def make_venv() -> None:
    if not PYTHON.exists():
        call(sys.executable, "-m", "venv", "--without-pip", str(VENV))
        site = sysconfig.get_path("purelib")
        added = Path(sysconfig.get_path("purelib", vars={"base": str(VENV)})) / "over_libraries.pth"
        added.write_text(f"import site; site.addsitedir({site!r})\n")
    pip("-r", str(HERE / "requirements-programs.txt"))


def check_out(program: Program) -> None:
    """Clone the one commit, as it is: what an earlier run has changed or left there is gone."""
    folder = source(program)
    if not (folder / ".git").exists():
        call("git", "init", "--quiet", str(folder))
    git = ("git", "-C", str(folder))
    if subprocess.run((*git, "cat-file", "-e", f"{program.commit}^{{commit}}"), stderr=subprocess.DEVNULL).returncode:
        call(*git, "fetch", "--quiet", "--depth", "1", f"https://github.com/{program.repository}", program.commit)
    call(*git, "checkout", "--quiet", "--force", program.commit)
    call(*git, "clean", "--quiet", "-ffdx")


def command(program: Program) -> list[str]:
    return program.command.format(data=DATA).split()


def environment(program: Program) -> dict[str, str]:
    search_path = [packages(program), HERE / "stand_ins", source(program) / program.folder]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, search_path)),
        "TORCH_HOME": str(DATA / "torch_home"),
        "WANDB_MODE": "offline",
    }


def source(program: Program) -> Path:
    return ROOT / program.repository.replace("/", "+")


def packages(program: Program) -> Path:
    return ROOT / f"packages-{'-'.join(program.packages)}"


def pip(*arguments: str) -> None:
    call(str(PYTHON), "-m", "pip", "install", "--quiet", *arguments)


def call(*command: str) -> None:
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
