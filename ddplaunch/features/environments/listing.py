"""What a folder of an environment consists of, and whether another machine has the same one.

Runs in the process of the command, and in an agent without a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping

from ddplaunch.features.snapshot.code_files import CodeFile

_COMPILED = "__pycache__/"
_SYSTEM = ("/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/", "/etc/", "/proc/", "/sys/", "/dev/")
"""What links to these mean is on each machine."""


def identity_of(path: str) -> str:
    """A text that is the same where another machine sees this very file or link, and nowhere else; empty: no file."""
    try:
        found = os.lstat(path)
    except OSError:
        return ""
    return f"{found.st_ino} {found.st_ctime_ns} {found.st_mtime_ns} {found.st_size}"


def files_of(folder: str, left_out: Collection[str], interpreter: str) -> dict[str, CodeFile]:
    """The files and links below ``folder``, by path relative to it.

    A link that leads out of it stays a link if it leads to the system, or to the folder ``interpreter``; else, as one
    to a cache of packages, the file is taken, with its real path, to which it leads. Anything else is ignored.

    Args:
        folder: an absolute path.
        left_out: files and folders, relative to it.
        interpreter: the folder of the Python with which the environment was made.

    Raises:
        OSError: it cannot be read.
    """
    kept = (*_SYSTEM, os.path.join(os.path.realpath(interpreter), ""))
    return dict(_below(folder, "", left_out, kept))


def _below(root: str, inside: str, left_out: Collection[str], kept: tuple[str, ...]) -> Iterator[tuple[str, CodeFile]]:
    with os.scandir(os.path.join(root, inside)) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        path = os.path.join(inside, entry.name)
        if path in left_out:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _below(root, path, left_out, kept)
        elif file := _file(root, path, entry, kept):
            yield path, file


def _file(root: str, path: str, entry: os.DirEntry[str], kept: tuple[str, ...]) -> CodeFile | None:
    status, full, target = entry.stat(follow_symlinks=False), os.path.join(root, path), ""
    if stat.S_ISLNK(status.st_mode):
        target = _target(root, full)
        real = os.path.realpath(full)
        if target.startswith("/") and not real.startswith(kept) and os.path.isfile(real):
            status, full, target = os.stat(real), real, ""
    elif not stat.S_ISREG(status.st_mode):
        return None
    numbers = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return CodeFile(full, *numbers, target=target)


def _target(root: str, link: str) -> str:
    """Where a link leads: below the folder relative to the link's own, elsewhere absolute."""
    target = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
    return os.path.relpath(target, os.path.dirname(link)) if target.startswith(f"{root}/") else target


def content_of(files: Mapping[str, CodeFile], hashes: Mapping[str, str]) -> str:
    """A hash of all paths and contents, but of what Python compiles by itself. ``hashes``: by real path."""
    return _hash([[path, file.mode & 0o100, file.target or hashes[file.path]] for path, file in _lasting(files)])


def signature_of(files: Mapping[str, CodeFile]) -> str:
    """A hash of all paths and sizes: environments in which these are equal have the same packages."""
    return _hash([[path, file.target or file.size] for path, file in _lasting(files)])


def _lasting(files: Mapping[str, CodeFile]) -> Iterator[tuple[str, CodeFile]]:
    return ((path, file) for path, file in sorted(files.items()) if _COMPILED not in path)


def _hash(found: object) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
