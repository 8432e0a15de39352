"""A Python with all packages of this one, in which the stub of torch is installed in place of torch.

The stub on PYTHONPATH is no installed package, as a keeper of ``--keep-warm`` needs it.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

STUBS = Path(__file__).with_name("stubs")


def build(folder: Path) -> Path:
    """The interpreter of a virtual environment in ``folder``, beside which ``ddplaunch`` lies."""
    packages = Path(sysconfig.get_path("purelib"))
    python, own_packages = folder / "bin" / "python3", folder / packages.relative_to(sys.prefix)
    python.parent.mkdir()
    own_packages.mkdir(parents=True)
    shutil.copy(Path(sys.prefix, "pyvenv.cfg"), folder)
    python.symlink_to(Path(sys.executable).resolve())
    stubs = [path for path in STUBS.iterdir() if path.name != "__pycache__"]
    hidden = {"__pycache__", *(path.stem for path in stubs)}
    for each in (*stubs, *(path for path in packages.iterdir() if path.name not in hidden)):
        (own_packages / each.name).symlink_to(each)
    command = python.with_name("ddplaunch")
    command.write_text(f"#!{python}\nfrom ddplaunch.__main__ import main\n\nmain()\n")
    command.chmod(0o755)
    return python


def other_pythons() -> list[str]:
    """Interpreters of other versions that ddplaunch allows, installed beside this one, as by pyenv; perhaps none."""
    found = {path.resolve() for path in Path(sys.base_prefix).parent.glob("*/bin/python3.1[0-9]")}
    return sorted(map(str, found - {Path(sys.executable).resolve()}))
