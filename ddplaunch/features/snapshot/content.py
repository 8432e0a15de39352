"""The hashes of the code's files. Those of files that have not changed since the last snapshot are not read again.

Runs in the process of the command, and in threads of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO

from ddplaunch.errors import LaunchError
from ddplaunch.features.snapshot import code_files
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.features.snapshot.code_files import CodeFile

THREADS = 8

_INDEX = "index.json"
_COLUMNS = 5
_SAME_MOMENT_NS = 2_000_000_000
"""A file that has changed so shortly before it was read may change again without another time: it is read again."""


class Changed(Exception):
    """A file is not as it was listed."""

    def __init__(self, path: str) -> None:
        self.path = path


def hash_of(data: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def index_of(project: str) -> dict[str, Any]:
    """``files``: the hashes of the files as they were read last, by path; ``last``: the snapshot that had them.

    A hash stands behind what must not have changed: ``[size, mtime_ns, ctime_ns, inode, hash]``.
    """
    with (
        contextlib.suppress(OSError, ValueError, TypeError),
        kept_files.open_regular(os.path.join(project, _INDEX)) as file,
    ):
        found = json.loads(file.read())
        if isinstance(found, dict) and isinstance(files := found.get("files"), dict):
            return {**found, "files": {path: each for path, each in files.items() if len(each) == _COLUMNS}}
    return {"files": {}}


def write_index(
    project: str, files: Mapping[str, CodeFile], listed: Mapping[str, str], last: str, begun_ns: int
) -> None:
    """Write what the next ``index_of`` returns.

    Args:
        project: as there.
        files: by path, how they were listed.
        listed: by path, the hashes of what was read later.
        last: the name of the snapshot that has these files.
        begun_ns: when the first was read, in nanoseconds since 1970.
    """
    limit_ns = begun_ns - _SAME_MOMENT_NS
    known = {
        path: (*_state(file), listed[path])
        for path, file in files.items()
        if not file.target and max(file.mtime_ns, file.ctime_ns) < limit_ns
    }
    kept_files.write_whole(os.path.join(project, _INDEX), json.dumps({"last": last, "files": known}))


def _state(file: CodeFile) -> tuple[int, ...]:
    return (file.size, file.mtime_ns, file.ctime_ns, file.inode)


def hashes_of(root: str, files: Mapping[str, CodeFile], index: Mapping[str, Any]) -> dict[str, str]:
    """By path, the hash of each file's content, or the target of a link; in the order of the paths."""

    def known(file: CodeFile) -> str | None:
        *state, found = index["files"].get(file.path) or (None,)
        return str(found) if tuple(state) == _state(file) else None

    hashes = {path: f"-> {files[path].target}" if files[path].target else known(files[path]) for path in sorted(files)}
    unknown = [path for path, found in hashes.items() if found is None]
    with ThreadPoolExecutor(THREADS) as pool:
        read = dict(zip(unknown, pool.map(lambda path: hash_of_file(root, files[path]), unknown), strict=True))
    return {path: found or read[path] for path, found in hashes.items()}


def hash_of_file(root: str, file: CodeFile) -> str:
    """The hash of what is in the file now. Raises as ``opened``."""
    with opened(root, file) as source:
        return digest(source, None)


def opened(root: str, file: CodeFile) -> BinaryIO:
    """The file, to be read.

    Raises:
        Changed: it is no file any more, or another one.
        LaunchError: it cannot be read.
    """
    path = os.path.join(root, file.path)
    try:
        return os.fdopen(kept_files.regular_fd(path, os.O_NOFOLLOW), "rb")
    except OSError as error:
        if not code_files.is_unchanged(root, file):
            raise Changed(file.path) from None
        hint = f"Name it in {code_files.IGNORE_FILE} if it is no code."
        raise LaunchError(f"--snapshot: {quote(path, 500)}: {error.strerror}", hint) from None


def digest(source: BinaryIO, copy: BinaryIO | None) -> str:
    """Read all of ``source``, write it to ``copy``, and return its hash."""
    found = hashlib.sha256()
    while data := source.read(1 << 20):
        found.update(data)
        if copy:
            copy.write(data)
    return found.hexdigest()
