"""Makes wheels, so that uv installs packages without a network."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
    return str(pytest.importorskip("uv").find_uv_bin())


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


def python_downloads(folder: Path) -> Path:
    """A file for UV_PYTHON_DOWNLOADS_JSON_URL: uv can install this version of Python, without what it rarely needs."""
    folder.mkdir()
    base, version = Path(sys.base_prefix), interpreter()
    library = base / "lib" / f"python{version}"

    def wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = info.name.rpartition("/")[2]
        is_left_out = name in ("test", "site-packages", "__pycache__", "idlelib", "ensurepip") or "config-" in name
        return None if is_left_out else info

    with tarfile.open(folder / "python.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(Path(sys.executable).resolve(), f"python/bin/python{version}")
        archive.add(library, f"python/lib/python{version}", filter=wanted)
    major, minor, patch = sys.version_info[:3]
    machine, libc = os.uname().machine, "gnu" if os.confstr("CS_GNU_LIBC_VERSION") else "musl"
    entry = {
        "name": "cpython",
        "arch": {"family": machine, "variant": None},
        "os": "linux",
        "libc": libc,
        "major": major,
        "minor": minor,
        "patch": patch,
        "prerelease": "",
        "url": (folder / "python.tar.gz").as_uri(),
        "sha256": None,
        "variant": None,
        "build": "20260101",
    }
    path = folder / "downloads.json"
    path.write_text(json.dumps({f"cpython-{major}.{minor}.{patch}-linux-{machine}-{libc}": entry}))
    return path


def repacked(folder: Path, names: Sequence[str]) -> None:
    """Wheels of packages that are installed here, and of those that they need; without their programs."""
    folder.mkdir(parents=True)
    for name in {needed for each in names for needed in (each, *_needed_by(each))}:
        found = metadata.distribution(name)
        files = [file for file in found.files or () if ".." not in file.parts and "__pycache__" not in file.parts]
        stem = next(file.parts[0] for file in files if file.parts[0].endswith(".dist-info")).removesuffix(".dist-info")
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
            for file in files:
                if file.name != "RECORD":
                    archive.write(str(found.locate_file(file)), str(file))
            record = "".join(f"{file},,\n" for file in files)
            archive.writestr(f"{stem}.dist-info/RECORD", record)


def _needed_by(name: str) -> set[str]:
    """The packages that an installed one needs here, directly and through others."""
    found: set[str] = set()
    for requirement in map(Requirement, metadata.requires(name) or ()):
        if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
            found |= {requirement.name, *_needed_by(requirement.name)}
    return found
