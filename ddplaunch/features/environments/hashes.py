"""The hashes of files that hosts may want. Those of files that have not changed since the last run are not read again.

Runs in the process of the command, and in threads of it. What was read is noted in the folder for environments.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

from ddplaunch.errors import LaunchError
from ddplaunch.features.environments import places
from ddplaunch.features.snapshot import content
from ddplaunch.features.snapshot.code_files import CodeFile

_FOLDER = "hashes"


def of_files(paths: Iterable[str], name: str) -> dict[str, str]:
    """By path, an absolute one of a file and no link, the SHA-256 of each file.

    ``name`` is that of the list: other files that have had this name are forgotten.

    Raises:
        LaunchError: a file cannot be read, or is no file any more.
    """
    files, begun_ns = {path: _as_listed(path) for path in paths}, time.time_ns()
    folder = os.path.join(places.base_folder(""), _FOLDER, content.hash_of(os.fsencode(name))[:16])
    index = content.index_of(folder)
    try:
        found = content.hashes_of("", files, index)
    except content.Changed as changed:
        raise LaunchError(f"--env: {changed.path!a} changes while it is read", "Try again when it does not.") from None
    except LaunchError as error:
        raise LaunchError(error.message.replace("--snapshot", "--env", 1)) from None
    if any(path not in index["files"] for path in files):
        with contextlib.suppress(OSError):  # Then they are read again next time.
            os.makedirs(folder, mode=0o700, exist_ok=True)
            content.write_index(folder, files, found, "", begun_ns)
    return found


def _as_listed(path: str) -> CodeFile:
    try:
        found = os.stat(path)
    except OSError as error:
        raise LaunchError(f"--env: {path!a}: {error.strerror}") from None
    return CodeFile(path, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
