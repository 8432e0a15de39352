"""Makes a copy of a snapshot on this machine, for ``--sync``. Runs in an agent without a run, in its main thread.

Everything is below ``HOME_BASE``: ``snapshots/PROJECT/NAME`` are the copies, ``received`` beside them has files that
have arrived for one that is not complete, and ``work/PROJECT`` is the folder in which workers run. That has links to
the files of the newest copy, and whatever the workers write; only the links are ever removed.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from ddplaunch.errors import LaunchError
from ddplaunch.features.snapshot import content, copies, old_copies
from ddplaunch.features.snapshot.copies import Facts
from ddplaunch.features.snapshot.queries import (
    MAX_WANTED,
    PART_BYTES,
    CopyAnswer,
    MakeCopy,
    PutPart,
    Wanted,
)
from ddplaunch.features.snapshot.records import HOME_BASE, MARKER
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote

_RECEIVED, _LOCK = "received", ".lock"
_LOOK_S = 0.1
_MAX_LINKS = 3
_OTHERS_S = 20.0
"""So long an agent waits for another one, of another launcher, that makes copies of the same project."""

_lock: list[int] = []
"""The descriptor of the file by which this process holds the project, until it ends."""

_problems: list[str] = []
"""Why parts could not be kept since the last answer: the sender does not wait for an answer to each."""


def serve(query: MakeCopy | PutPart, _stream: BinaryIO, outbox: Any) -> None:
    """Answer MakeCopy, or keep what PutPart brings. Other queries may follow."""
    try:
        if isinstance(query, PutPart):
            return None if _problems else _keep(query)
        answer = CopyAnswer(problem=_problems.pop()) if _problems else _answer(query)
    except OSError as error:
        answer = CopyAnswer(problem=quote(f"{error.filename or HOME_BASE}: {error.strerror}", 1000))
    except (LaunchError, ValueError, KeyError, TypeError, zlib.error) as error:
        answer = CopyAnswer(problem=quote(str(error), 1000))
    if isinstance(query, PutPart):
        _problems.append(answer.problem)
    else:
        outbox.send(answer)
    return None


def _project(name: str) -> str:
    return os.path.join(os.path.expanduser(HOME_BASE), copies.FOLDER, name)


def _received(project: str, digest: str) -> str:
    return os.path.join(_project(project), _RECEIVED, digest)


def _keep(part: PutPart) -> None:
    """Write the part; a file that is complete, and is what its hash says, gets its name."""
    path = _received(part.project, part.hash)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    fd = os.open(f"{path}.part", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "r+b") as file:
        data = zlib.decompressobj().decompress(base64.b64decode(part.data), PART_BYTES)
        file.seek(part.offset)
        file.write(data)
        if part.offset + len(data) < part.size:
            return
        file.seek(0)
        is_whole = content.digest(file, None) == part.hash
        os.fsync(fd)
    if is_whole:
        os.replace(f"{path}.part", path)
    else:
        os.unlink(f"{path}.part")


def _hold(project: str) -> None:
    """Have no other agent make copies of the project here, until this process ends.

    Raises:
        LaunchError: another one does, for longer than ``_OTHERS_S``.
    """
    if _lock:
        return
    _lock.append(os.open(os.path.join(project, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    deadline = time.monotonic() + _OTHERS_S
    while True:
        try:
            return fcntl.flock(_lock[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LaunchError("another command copies code of this project to this host") from None
        time.sleep(_LOOK_S)


def _answer(query: MakeCopy) -> CopyAnswer:
    _check_inside(query.cwd)
    project, marker = _project(query.project), _received(query.project, query.marker)
    folder, received = os.path.join(project, query.name), os.path.join(project, _RECEIVED, "")
    os.makedirs(project, mode=0o700, exist_ok=True)
    _hold(project)
    if is_here := os.path.exists(os.path.join(folder, MARKER)):
        os.utime(os.path.join(folder, MARKER))  # From now on nobody deletes it as an old one.
        found = copies.facts(folder)
        missing = copies.damaged(folder, found)
    elif os.path.exists(marker):
        found = _checked(marker)
        missing = list(found.files)
    else:
        return CopyAnswer((_wanted(query, query.marker, query.marker_bytes),))
    sources = _sources(project, found)
    if wanted := _all_wanted(query, [found.files[path] for path in missing], sources):
        return CopyAnswer(wanted)

    uses = Counter(noted[2] for noted in found.files.values() if len(noted) > 1)

    def copy(path: str, noted: Sequence[Any], to: str) -> None:
        if uses[noted[2]] == 1 and sources[noted[2]].startswith(received):
            os.chmod(sources[noted[2]], noted[3])
            os.utime(sources[noted[2]], ns=(noted[1], noted[1]))
            if copies.linked(sources[noted[2]], noted, to):
                return
        with kept_files.open_regular(sources[noted[2]], os.O_NOFOLLOW) as source:
            copies.copy_of(source, path, noted, to)

    if is_here:
        copies.repair(folder, found, copy)
    else:
        with open(marker, "rb") as file:
            copies.build(folder, found, {MARKER: file.read()}, _newest(project), copy)
    _link_work(folder, os.path.join(os.path.expanduser(HOME_BASE), "work", query.project), query.cwd, found)
    shutil.rmtree(os.path.join(project, _RECEIVED), ignore_errors=True)
    old_copies.delete_old(os.path.dirname(project))
    return CopyAnswer(links=tuple(_dangling(folder, found)))


def _checked(marker: str) -> Facts:
    """What the marker says. Raises ValueError: it names a path outside of the snapshot."""
    with open(marker, "rb") as file:
        found = Facts(**json.loads(file.read()))
    for path in found.files:
        _check_inside(path or "/")
    return found


def _check_inside(path: str) -> None:
    """Raises ValueError: a path that is to be relative to the snapshot leads out of it."""
    if path and any(name in ("", ".", "..") for name in path.split("/")):
        raise ValueError(f"the snapshot names a file outside of it: {quote(path)}")


def _sources(project: str, found: Facts) -> dict[str, str]:
    """Files of this machine with contents of the snapshot, by hash: of the newest snapshot, and what has arrived."""
    sources: dict[str, str] = {}
    newest = _newest(project)
    with contextlib.suppress(LaunchError):
        for path, noted in copies.facts(newest).files.items():
            if len(noted) > 1 and copies.is_as_noted(os.path.join(newest, path), noted):
                sources[noted[2]] = os.path.join(newest, path)
    with contextlib.suppress(FileNotFoundError):
        folder = os.path.join(project, _RECEIVED)
        sources |= {name: os.path.join(folder, name) for name in os.listdir(folder) if not name.endswith(".part")}
    return sources


def _newest(project: str) -> str:
    """The snapshot of the project that was used last; empty if there is none."""
    markers = (os.path.join(entry.path, MARKER) for entry in os.scandir(project) if not entry.name.startswith("."))
    used = {marker: os.stat(marker).st_mtime for marker in markers if os.path.exists(marker)}
    return os.path.dirname(max(used, key=lambda marker: used[marker], default=""))


def _all_wanted(query: MakeCopy, files: Sequence[Sequence[Any]], sources: Mapping[str, str]) -> tuple[Wanted, ...]:
    """What is to be sent next, at most ``round_bytes``, or the first part of one file."""
    sizes = {noted[2]: noted[0] for noted in files if len(noted) > 1 and noted[2] not in sources}
    found, nbytes = list[Wanted](), 0
    for digest, size in sizes.items():
        wanted = _wanted(query, digest, size)
        nbytes += wanted.nbytes
        if found and (nbytes > query.round_bytes or len(found) == MAX_WANTED):
            break
        found.append(wanted)
    return tuple(found)


def _wanted(query: MakeCopy, digest: str, size: int) -> Wanted:
    try:
        offset = os.stat(f"{_received(query.project, digest)}.part").st_size
    except FileNotFoundError:
        offset = 0
    offset = offset if offset < size else 0
    return Wanted(digest, offset, min(size - offset, query.round_bytes))


# The folder in which workers run.


def _link_work(folder: str, work: str, cwd: str, found: Facts) -> None:
    """Have ``work`` show the code: the same folders, with links to the files of the snapshot ``folder``.

    What a worker writes into a folder of the code is thus found beside other code, too. The links are noted in a file
    beside ``work``, so that those of older code are removed, and nothing else.

    Raises:
        LaunchError: a worker, or the user, has put something else there.
    """
    links = {
        path: noted[0] if _leads_inside(noted) else os.path.join(folder, path) for path, noted in found.files.items()
    }
    folders = copies.folders_of(links)
    noted_links = f"{work}.links.json"
    os.makedirs(work, mode=0o700, exist_ok=True)
    for path, target in (before := _read_links(noted_links)).items():
        if links.get(path) != target and _target(os.path.join(work, path)) == target:
            os.unlink(os.path.join(work, path))
    for old in sorted(copies.folders_of(before).keys() - folders, reverse=True):
        with contextlib.suppress(OSError):  # A worker has written into it.
            os.rmdir(os.path.join(work, old))
    kept_files.write_whole(noted_links, json.dumps(links))
    try:
        for each in (*sorted(folders), cwd):
            os.makedirs(here := os.path.join(work, each), mode=0o700, exist_ok=True)
        for path, target in links.items():
            if _target(here := os.path.join(work, path)) != target:
                os.symlink(target, here)
    except (FileExistsError, NotADirectoryError):
        problem = f"{here} is in the way: the code has a file or folder of this name"
        raise LaunchError(problem) from None


def _read_links(path: str) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError), kept_files.open_regular(path) as file:
        found = json.loads(file.read())
        return found if isinstance(found, dict) else {}
    return {}


def _target(path: str) -> str:
    """Where a link leads; of what is no link, empty."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _leads_inside(noted: Sequence[Any]) -> bool:
    """Whether this is a link of the code to what is copied, too."""
    return len(noted) == 1 and not noted[0].startswith("/")


def _dangling(folder: str, found: Facts) -> list[str]:
    """Links of the code that lead out of it to what is not here; the first ones."""
    links = (path for path, noted in found.files.items() if len(noted) == 1 and re.match("/", noted[0]))
    missing = (path for path in links if not os.path.exists(os.path.join(folder, path)))
    return [quote(path, 500) for _, path in zip(range(_MAX_LINKS), missing, strict=False)]
