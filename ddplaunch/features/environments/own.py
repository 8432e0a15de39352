"""The launcher's own environment, for ``--env pack``: where it is, whether it can be copied, and what it consists of.

Runs in the process of the command. An environment is a virtual one with the Python that it was made with, or one that
is complete by itself, as those of conda.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ddplaunch.errors import UsageError
from ddplaunch.features.environments import hashes, listing
from ddplaunch.features.snapshot import content
from ddplaunch.features.snapshot.copies import Facts
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.agent_entry import PACKAGE_ROOT
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.features.snapshot.code_files import CodeFile

_SYSTEM = ("/", "/usr", "/usr/local", "/opt", "/home", "/root")
"""Folders that belong to a machine."""

_OTHERS = ("pkgs", "envs")
"""Of an installation of conda: its cache, and other environments."""

_FILE_HINT = "--env FILE makes an environment of a uv.lock, pyproject.toml or requirements.txt on each host."


@dataclass(frozen=True)
class Folder:
    """A folder that hosts get.

    Attributes:
        path: also on the hosts.
        python: an interpreter in it.
        left_out: what hosts do not get, relative to it.
    """

    path: str
    python: str
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class OwnEnvironment:
    """The environment of this process.

    Attributes:
        folder: the environment.
        base: the Python with which it was made; None: it is complete by itself.
        is_base_of_machine: each machine must have that itself.
    """

    folder: Folder
    base: Folder | None
    is_base_of_machine: bool


def environment(*, needs_torch: bool) -> OwnEnvironment:
    """The environment of this process.

    Raises:
        UsageError: it is none that can be copied.
    """
    prefix, base = sys.prefix, sys.base_prefix
    if os.path.realpath(prefix) in _SYSTEM:
        text = (
            f"--env pack copies a virtual environment, or one of conda: the launcher runs with the Python in {prefix}"
        )
        raise UsageError(text, f"Start ddplaunch from such an environment. {_FILE_HINT}", ("--env",))
    folder = Folder(prefix, sys.executable, _OTHERS)
    torch = _folder_of_torch()
    if needs_torch and not torch.startswith(f"{prefix}/"):
        where = f"torch is in {quote(torch, 500)}, outside of" if torch else "there is no torch in"
        raise UsageError(f"--env pack: {where} the launcher's environment {quote(prefix, 500)}", _FILE_HINT, ("--env",))
    if prefix == base:
        return OwnEnvironment(folder, None, False)
    library = os.path.relpath(sysconfig.get_path("stdlib", vars={"installed_base": base, "base": base}), base)
    unused = () if _uses_packages_of_base() else (f"{library}/site-packages",)
    interpreter = str(getattr(sys, "_base_executable", "") or f"{base}/bin/python3")
    found = Folder(base, interpreter, (*_OTHERS, *unused))
    return OwnEnvironment(folder, found, os.path.realpath(base) in _SYSTEM)


def _folder_of_torch() -> str:
    found = find_spec("torch")
    return os.path.dirname(os.path.dirname(found.origin)) if found and found.origin else ""


def _uses_packages_of_base() -> bool:
    with contextlib.suppress(OSError), open(os.path.join(sys.prefix, "pyvenv.cfg"), encoding="utf-8") as file:
        return bool(re.search(r"^include-system-site-packages *= *true", file.read(), re.MULTILINE | re.IGNORECASE))
    return False


# What is in a folder.


@dataclass(frozen=True)
class Packed:
    """What hosts get of a folder.

    Attributes:
        facts: for the marker of the copies.
        sources: the paths of its files, by hash.
    """

    facts: Facts
    sources: Mapping[str, str]


def files_of(folder: Folder) -> dict[str, CodeFile]:
    """As ``listing.files_of``. Raises OSError."""
    return listing.files_of(folder.path, folder.left_out, sys.base_prefix)


def packed(folder: Folder) -> Packed:
    """Read what is in the folder, as far as it has changed since the last time.

    Raises:
        LaunchError: a file cannot be read. OSError: a folder cannot.
    """
    files = files_of(folder)
    found = hashes.of_files((file.path for file in files.values() if not file.target), folder.path)
    noted = {
        path: (file.target,)
        if file.target
        else (file.size, file.mtime_ns, found[file.path], stat.S_IMODE(file.mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
        for path, file in files.items()
    }
    facts = Facts(
        root=folder.path,
        commit="",
        branch="",
        modified=0,
        untracked=0,
        content=listing.content_of(files, found),
        files=noted,
    )
    return Packed(facts, {found[file.path]: file.path for file in files.values() if not file.target})


def name_of(packed: Packed) -> str:
    """The name of the copy with this content."""
    return content.hash_of(packed.facts.content.encode())[:12]


def outside(folder: str) -> list[str]:
    """Folders of which the environment takes modules, and that are not in it: of packages installed by ``-e``."""
    found = {os.path.realpath(each) for each in (*_editable(folder), *_search_path(folder))}
    inside = tuple(os.path.join(os.path.realpath(each), "") for each in (folder, sys.base_prefix))
    return sorted(
        each for each in found if not f"{each}/".startswith(inside) and each != os.path.realpath(PACKAGE_ROOT)
    )


def _editable(folder: str) -> Iterator[str]:
    for path in glob.glob(f"{glob.escape(folder)}/lib/python*/site-packages/*.dist-info/direct_url.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError), open(path, encoding="utf-8") as file:
            found = json.load(file)
            if found["dir_info"]["editable"]:
                yield unquote(urlsplit(found["url"]).path)


def _search_path(folder: str) -> Iterator[str]:
    for path in glob.glob(f"{glob.escape(folder)}/lib/python*/site-packages/*.pth"):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            for line in map(str.strip, file):
                if line.startswith("/") and os.path.isdir(line):
                    yield line
