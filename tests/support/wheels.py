"""Makes wheels, so that uv installs packages without a network."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.installed_stub import STUBS


def wheel(folder: Path, name: str, version: str, files: Mapping[str, str], requires: Sequence[str] = ()) -> Path:
    """A wheel of a package with these files."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
    metadata += [f"Requires-Dist: {each}\n" for each in requires]
    about = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    everything = {**files, f"{info}/METADATA": "".join(metadata), f"{info}/WHEEL": about}
    record = "".join(f"{each},,\n" for each in (*everything, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in {**everything, f"{info}/RECORD": record}.items():
            archive.writestr(each, text)
    return path


def torch_wheel(folder: Path) -> Path:
    """A wheel of the stub of torch."""
    stub = STUBS / "torch"
    files = {str(path.relative_to(STUBS)): path.read_text() for path in stub.rglob("*.py")}
    return wheel(folder, "torch", "2.99.0", {**files, "torch/version.py": "__version__ = '2.99.0'\n"})


def uv() -> str:
    """The uv of the tests; the tests' own PATH need not have it."""
    from uv import find_uv_bin

    return str(find_uv_bin())


def path_without_uv() -> str:
    """PATH without folders that have a uv."""
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(each for each in folders if not shutil.which("uv", path=each))


def recording_uv(folder: Path, before: str = "") -> Path:
    """A folder for PATH whose uv writes its arguments to ``calls`` there, and runs ``before``, a shell text, first."""
    folder.mkdir()
    program = folder / "uv"
    program.write_text(f'#!/bin/sh\necho "$@" >>{folder}/calls\n{before}\nexec {uv()} "$@"\n')
    program.chmod(0o755)
    return folder


def interpreter() -> str:
    """The version of this Python, as uv names it."""
    return ".".join(map(str, sys.version_info[:2]))
