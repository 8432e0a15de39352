"""Snapshots on disk: a folder with the files of the code, made whole or not at all, and used again where it is equal.

Runs in the process of the command. A snapshot is ``BASE/snapshots/PROJECT/HASH``: PROJECT has the name of the code's
folder and a hash of its path, HASH is made of the commit, the branch, and the path and content of each file. It is
built beside that, each file is synced, the marker is written last, and then it gets its name: what has that name is
complete. Files that an earlier snapshot of the project has are hard links to its files. Links lead to all else that is
in the folders of the code, so that what git ignores, as data or checkpoints, is found beside the code as before.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ddplaunch.errors import LaunchError
from ddplaunch.features.snapshot import code_files, content
from ddplaunch.features.snapshot.records import MARKER
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.run_result import CodeOfRun
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.features.snapshot.code_files import CodeFile, Repository

FOLDER = "snapshots"
DIFF = ".ddplaunch-snapshot.diff"
LINK = "code"
"""In a run folder, a link to its snapshot: as long as it is there, the snapshot is kept."""

_MAX_DIFF_BYTES = 10 << 20
_TRIES = 3
_KEEP_S = 7 * 86400.0
"""So long after its last use, a snapshot is kept that no run folder names."""

_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOENT, errno.ENOSYS)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a snapshot is, as its marker says it.

    Attributes:
        root: the folder that was copied.
        commit: of the repository when it was copied; empty: there is none.
        modified: number of files that differ from the commit.
        untracked: number of files that git does not have.
        content: a hash of the paths and contents alone.
        files: by path, what it has: ``[size, mtime_ns, hash]`` of a file, ``[target]`` of a link.
    """

    root: str
    commit: str
    branch: str
    modified: int
    untracked: int
    content: str
    files: Mapping[str, Sequence[Any]]


def of_run(folder: str, found: Facts) -> CodeOfRun:
    """What report.json says of the snapshot ``folder``."""
    return CodeOfRun(folder, found.root, found.commit, found.branch, found.modified, found.untracked)


def facts(folder: str) -> Facts:
    """What the marker of a snapshot says.

    Raises:
        LaunchError: it is no snapshot, or is damaged.
    """
    path = os.path.join(folder, MARKER)
    try:
        with kept_files.open_regular(path) as file:
            found = Facts(**json.loads(file.read()))
            return found if isinstance(found.root, str) and isinstance(found.files, dict) else _refuse(folder)
    except OSError as error:
        raise LaunchError(f"{folder}: no snapshot of code: {error.strerror}", "See --take-snapshot.") from None
    except (ValueError, TypeError):
        return _refuse(folder)


def _refuse(folder: str) -> Facts:
    raise LaunchError(f"{folder}: the snapshot is damaged", "Delete the folder, and take the snapshot again.")


def take(repository: Repository, include: Sequence[str], base: str) -> str:
    """The snapshot of the code as it is now: a new one, or one that is equal. Returns its folder.

    ``include`` are absolute paths of what is code, too; ``base`` is the folder below which snapshots are kept.

    Raises:
        LaunchError: it cannot be taken; nothing of it is left. UsageError, as ``code_files.of_run``.
    """
    root = repository.root
    name = f"{os.path.basename(root)}-{content.hash_of(os.fsencode(root))[:8]}"
    project = os.path.join(base, FOLDER, name)
    try:
        os.makedirs(project, mode=0o700, exist_ok=True)
        project = os.path.realpath(project)
        for _ in range(_TRIES):
            files = code_files.of_run(repository, include, (os.path.realpath(base),))
            try:
                return _taken(repository, files, project)
            except content.Changed as error:
                changed = error.path
        raise LaunchError(f"--snapshot: {quote(changed)} changes while it is copied", "Try again when it does not.")
    except OSError as error:
        raise LaunchError(f"--snapshot: {error.filename or project}: {error.strerror}", _hint(error)) from None


def _hint(error: OSError) -> str:
    return "--log-dir names another folder for what ddplaunch keeps." if error.errno in _FULL else ""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def _taken(repository: Repository, files: Mapping[str, CodeFile], project: str) -> str:
    """The snapshot of ``files``, which may change meanwhile.

    Raises:
        content.Changed: they have.
        OSError: it cannot be written.
    """
    root, index = repository.root, content.index_of(project)
    listed = content.hashes_of(root, files, index)
    of_files = [(path, files[path].mode & 0o100, each) for path, each in listed.items()]
    own_hash = content.hash_of(json.dumps(of_files).encode())
    name = content.hash_of(f"{own_hash} {repository.commit} {repository.branch}".encode())[:12]
    folder = os.path.join(project, name)
    if os.path.isdir(folder):
        _repair(root, folder, facts(folder), files)
    else:
        diff = code_files.diff(repository, _MAX_DIFF_BYTES)
        found = Facts(
            root=root,
            commit=repository.commit,
            branch=repository.branch,
            modified=diff.count(b"\ndiff --git ") + diff.startswith(b"diff --git "),
            untracked=sum(not file.is_tracked for file in files.values()) if repository.is_git else 0,
            content=own_hash,
            files=_noted(files, listed),
        )
        _build(root, folder, found, diff, files, os.path.join(project, str(index.get("last"))))
        _delete_old(project)
    _link_others(root, folder, files)
    os.utime(os.path.join(folder, MARKER))
    content.write_index(project, files, listed, name)
    return folder


def _noted(files: Mapping[str, CodeFile], listed: Mapping[str, str]) -> dict[str, tuple[Any, ...]]:
    return {
        path: (file.target,) if file.target else (file.size, file.mtime_ns, listed[path])
        for path, file in files.items()
    }


# A new snapshot.


def _build(root: str, folder: str, found: Facts, diff: bytes, files: Mapping[str, CodeFile], previous: str) -> None:
    """Make ``folder``; ``previous`` is another snapshot of the project, or does not exist.

    Raises:
        content.Changed: a file is not what ``found`` says.
        OSError: no room, or no access.
    """
    earlier: Mapping[str, Any] = {}
    with contextlib.suppress(LaunchError):
        earlier = facts(previous).files
    part = tempfile.mkdtemp(prefix=".part-", dir=os.path.dirname(folder))
    try:
        folders = _folders_of(files)
        for each in sorted(folders):
            os.makedirs(os.path.join(part, each), exist_ok=True)

        def add(file: CodeFile) -> None:
            to = os.path.join(part, file.path)
            if file.target:
                os.symlink(_target(root, file, {*files, *folders}), to)
            elif earlier.get(file.path) != list(found.files[file.path]) or not _linked(previous, file, to):
                _copy(root, file, to, found.files[file.path][2])

        with ThreadPoolExecutor(content.THREADS) as pool:
            list(pool.map(add, files.values()))
        changed = next((file for file in files.values() if not code_files.is_unchanged(root, file)), None)
        if changed:
            raise content.Changed(changed.path)
        _write_synced(os.path.join(part, DIFF), diff)
        _write_synced(os.path.join(part, MARKER), json.dumps(vars(found)).encode())
        for each in folders:
            _sync(os.path.join(part, each))
        _name(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _name(part: str, folder: str) -> None:
    """Give the snapshot its name, unless another command has made the same meanwhile."""
    try:
        os.rename(part, folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    _sync(os.path.dirname(folder))


def _target(root: str, file: CodeFile, copied: Collection[str]) -> str:
    """Where a link of the code leads in a snapshot: what is copied is in the snapshot, all else where it was."""
    folder = os.path.join(root, os.path.dirname(file.path))
    full = os.path.normpath(os.path.join(folder, file.target))
    inside = os.path.relpath(full, root).removeprefix(".")  # The root itself is the folder "".
    return os.path.relpath(full, folder) if inside in copied else full


def _linked(previous: str, file: CodeFile, to: str) -> bool:
    """Make a hard link to the file of another snapshot. False if that cannot be: it is gone, or changed."""
    source = os.path.join(previous, file.path)
    try:
        if _is_as_noted(source, (file.size, file.mtime_ns)) and stat.S_IMODE(os.lstat(source).st_mode) == _mode(file):
            os.link(source, to, follow_symlinks=False)
            return True
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    return False


def _mode(file: CodeFile) -> int:
    return stat.S_IMODE(file.mode) | stat.S_IRUSR | stat.S_IWUSR


def _copy(root: str, file: CodeFile, to: str, expected: str) -> None:
    with content.opened(root, file) as source, open(to, "xb") as copy:
        if content.digest(source, copy) != expected:
            raise content.Changed(file.path)
        copy.flush()
        os.fchmod(copy.fileno(), _mode(file))
        os.utime(copy.fileno(), ns=(file.mtime_ns, file.mtime_ns))
        os.fsync(copy.fileno())


def _write_synced(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# A snapshot that is there.


def _is_as_noted(path: str, noted: Sequence[Any]) -> bool:
    """Whether a file of a snapshot has the size and the time that its marker says; or a link, whether it is one."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    if len(noted) == 1:
        return stat.S_ISLNK(found.st_mode)
    return stat.S_ISREG(found.st_mode) and (found.st_size, found.st_mtime_ns) == tuple(noted[:2])


def _repair(root: str, folder: str, found: Facts, files: Mapping[str, CodeFile]) -> None:
    """Copy again what a worker or the user has changed in the snapshot."""
    for path, noted in found.files.items():
        if not _is_as_noted(os.path.join(folder, path), noted) and path in files and len(noted) > 1:
            os.makedirs(os.path.join(folder, os.path.dirname(path)), exist_ok=True)
            part = os.path.join(folder, os.path.dirname(path), f".part-{os.urandom(6).hex()}")
            try:
                _copy(root, files[path]._replace(mtime_ns=noted[1]), part, noted[2])
                os.replace(part, os.path.join(folder, path))
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(part)


def _link_others(root: str, folder: str, files: Iterable[str]) -> None:
    """Link what is beside the code and is not copied; links of an earlier time whose file is gone are removed."""
    for parent, names in _folders_of(files).items():
        here = os.path.join(folder, parent)
        others = {entry.name for entry in _scan(os.path.join(root, parent))} - names - {".git", "__pycache__"}
        found = {entry.name for entry in _scan(here)} - names
        for name in found - others:
            if os.path.islink(os.path.join(here, name)):
                os.unlink(os.path.join(here, name))
        for name in others - found:
            with contextlib.suppress(FileExistsError):  # Another command has made it.
                os.symlink(os.path.join(root, parent, name), os.path.join(here, name))


def _folders_of(files: Iterable[str]) -> dict[str, set[str]]:
    """The folders of the code, and in each the names of its files and folders of the code."""
    found: dict[str, set[str]] = {"": set()}
    for path in files:
        while path:
            folder, name = os.path.split(path)
            found.setdefault(folder, set()).add(name)
            path = folder
    return found


def written(folder: str) -> list[str]:
    """What is in a snapshot and is neither code nor a link, and files of the code that have changed; paths."""
    known = facts(folder).files
    changed = [path for path, noted in known.items() if not _is_as_noted(os.path.join(folder, path), noted)]
    own = (MARKER, DIFF, "__pycache__")
    added = [
        os.path.relpath(entry.path, folder) + ("/" if entry.is_dir() else "")
        for parent, names in _folders_of(known).items()
        for entry in os.scandir(os.path.join(folder, parent))
        if entry.name not in names and entry.name not in own and not os.path.islink(entry.path)
    ]
    return [*changed, *added]


# Old snapshots.


def _delete_old(project: str) -> None:
    """Delete the snapshots that no run folder names, and that were not used for ``_KEEP_S``. Errors are ignored."""
    base = os.path.dirname(os.path.dirname(project))
    with contextlib.suppress(OSError):
        used = set(_used(base))
        for entry in list(os.scandir(project)):
            if entry.is_dir(follow_symlinks=False) and entry.path not in used and _is_old(entry):
                shutil.rmtree(entry.path, ignore_errors=True)


def _used(base: str) -> Iterator[str]:
    for run in os.scandir(base):
        for folder in (run.path, *(each.path for each in _scan(run.path))):
            with contextlib.suppress(OSError):
                yield os.path.realpath(os.readlink(os.path.join(folder, LINK)))


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def _is_old(entry: os.DirEntry[str]) -> bool:
    marker = os.path.join(entry.path, MARKER)
    last_use_s = os.stat(marker).st_mtime if os.path.exists(marker) else entry.stat().st_mtime
    return time.time() - last_use_s > _KEEP_S
