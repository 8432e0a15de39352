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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ddplaunch.errors import LaunchError
from ddplaunch.features.snapshot import code_files, content, old_copies
from ddplaunch.features.snapshot.ctrl_c import ctrl_c_raises
from ddplaunch.features.snapshot.records import DIFF, MARKER
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.run_result import CodeOfRun
from ddplaunch.system.files import kept_files, run_folder
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.features.snapshot.code_files import CodeFile, Repository

FOLDER = "snapshots"
_MAX_DIFF_BYTES = 10 << 20
_MAX_NAME = 40
"""Characters, in UTF-8 up to four bytes each: a name has at most 255."""

_TRIES = 3
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
        files: by path, what it has: ``[size, mtime_ns, hash, mode]`` of a file, ``[target]`` of a link.
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


def folder_in(base: str) -> str:
    """The folder of this user's snapshots; where others can write in ``base``, too, each user has one."""
    is_shared = os.path.isdir(base) and run_folder.is_public(Path(base))
    return os.path.join(os.path.realpath(base), f"{FOLDER}-{os.geteuid()}" if is_shared else FOLDER)


def project_in(base: str, root: str) -> str:
    """The folder of the snapshots of the code in ``root``."""
    readable = "".join(each if each.isprintable() else "_" for each in os.path.basename(root)[:_MAX_NAME])
    return os.path.join(folder_in(base), f"{readable}-{content.hash_of(os.fsencode(root))[:8]}")


def files_of(repository: Repository, include: Sequence[str], base: str) -> dict[str, CodeFile]:
    """What ``take`` copies, by path. Raises as ``code_files.of_run``."""
    snapshots = folder_in(base)
    return code_files.of_run(repository, include, (os.path.dirname(snapshots), snapshots))


def take(repository: Repository, include: Sequence[str], base: str) -> str:
    """The snapshot of the code as it is now: a new one, or one that is equal. Returns its folder.

    ``include`` are absolute paths of what is code, too; ``base`` is the folder below which snapshots are kept.

    Raises:
        LaunchError: it cannot be taken; nothing of it is left. UsageError, as ``code_files.of_run``.
    """
    project = ""
    try:
        snapshots = folder_in(base)
        run_folder.make_private(Path(snapshots))
        if not run_folder.is_own(Path(snapshots)):
            raise LaunchError(f"--snapshot: {snapshots} belongs to another user", _OTHER_FOLDER)
        project = project_in(base, repository.root)
        os.makedirs(project, mode=0o700, exist_ok=True)
        for _ in range(_TRIES):
            files = files_of(repository, include, base)
            try:
                with ctrl_c_raises():
                    return _taken(repository, files, project)
            except content.Changed as error:
                changed = error.path
        raise LaunchError(f"--snapshot: {quote(changed)} changes while it is copied", "Try again when it does not.")
    except OSError as error:
        hint = _OTHER_FOLDER if error.errno in _FULL else ""
        raise LaunchError(f"--snapshot: {error.filename or project or base}: {error.strerror}", hint) from None


_OTHER_FOLDER = "--log-dir names another folder for what ddplaunch keeps."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def _taken(repository: Repository, files: Mapping[str, CodeFile], project: str) -> str:
    """The snapshot of ``files``, which may change meanwhile.

    Raises:
        content.Changed: they have.
        OSError: it cannot be written.
    """
    root, index, begun_ns = repository.root, content.index_of(project), time.time_ns()
    listed = content.hashes_of(root, files, index)
    of_files = [(path, files[path].mode & 0o100, each) for path, each in listed.items()]
    own_hash = content.hash_of(json.dumps(of_files).encode())
    name = content.hash_of(f"{own_hash} {repository.commit} {repository.branch}".encode())[:12]
    folder = os.path.join(project, name)

    def copy(path: str, noted: Sequence[Any], to: str) -> None:
        with content.opened(root, files[path]) as source:
            copy_of(source, path, noted, to)

    def check() -> None:
        changed = next((file for file in files.values() if not code_files.is_unchanged(root, file)), None)
        if changed:
            raise content.Changed(changed.path)

    if os.path.exists(marker := os.path.join(folder, MARKER)):
        os.utime(marker)  # From now on nobody deletes it as an old one.
        repair(folder, facts(folder), copy)
    else:
        diff = code_files.diff(repository)
        found = Facts(
            root=root,
            commit=repository.commit,
            branch=repository.branch,
            modified=diff.count(b"\ndiff --git ") + diff.startswith(b"diff --git "),
            untracked=sum(not file.is_tracked for file in files.values()) if repository.is_git else 0,
            content=own_hash,
            files=_noted(root, files, listed),
        )
        written = {DIFF: diff[:_MAX_DIFF_BYTES], MARKER: json.dumps(vars(found)).encode()}
        build(folder, found, written, os.path.join(project, str(index.get("last"))), copy, check)
        old_copies.delete_old(os.path.dirname(project))
    _link_others(root, folder, files)
    content.write_index(project, files, listed, name, begun_ns)
    return folder


def _noted(root: str, files: Mapping[str, CodeFile], listed: Mapping[str, str]) -> dict[str, tuple[Any, ...]]:
    copied = {*files, *folders_of(files)}
    return {
        path: (_target(root, file, copied),)
        if file.target
        else (file.size, file.mtime_ns, listed[path], stat.S_IMODE(file.mode) | stat.S_IRUSR | stat.S_IWUSR)
        for path, file in files.items()
    }


# A new snapshot.


Copy = Callable[[str, Sequence[Any], str], None]
"""Copies a file of the code: its path, what the marker says of it, and the path of the copy."""


def build(
    folder: str,
    found: Facts,
    written: Mapping[str, bytes],
    previous: str,
    copy: Copy,
    check: Callable[[], None] = lambda: None,
    on_file: Callable[[], None] = lambda: None,
) -> None:
    """Make the snapshot ``folder``.

    Args:
        folder: its path; the folder above exists.
        found: what it has.
        written: files of ours in it, by name, the marker last.
        previous: another snapshot of the project, whose equal files are linked; or what does not exist.
        copy: copies the others.
        check: is called when all are copied.
        on_file: is called for each file and link that is there; in several threads.

    Raises:
        content.Changed: by ``copy`` or ``check``.
        OSError: no room, or no access.
    """
    earlier: Mapping[str, Any] = {}
    with contextlib.suppress(LaunchError):
        earlier = facts(previous).files
    part = tempfile.mkdtemp(prefix=old_copies.PART, dir=os.path.dirname(folder))
    try:
        folders = folders_of(found.files)
        for each in sorted(folders):
            os.makedirs(os.path.join(part, each), exist_ok=True)

        def add(path: str) -> None:
            to, noted = os.path.join(part, path), found.files[path]
            if len(noted) == 1:
                os.symlink(noted[0], to)
            elif list(earlier.get(path, ())) != list(noted) or not linked(os.path.join(previous, path), noted, to):
                copy(path, noted, to)
            on_file()

        with ThreadPoolExecutor(content.THREADS) as pool:
            list(pool.map(add, found.files))
            check()
            for name, data in written.items():
                _write_synced(os.path.join(part, name), data)
            list(pool.map(_sync, (os.path.join(part, each) for each in folders)))
        _name(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _name(part: str, folder: str) -> None:
    """Give the snapshot its name, unless another command has made the same meanwhile."""
    if os.path.isdir(folder) and not os.path.exists(os.path.join(folder, MARKER)):
        old_copies.delete(folder)  # What somebody has left of it.
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
    for found in (full, os.path.realpath(full)):  # The way may lead through other links of the code.
        if os.path.relpath(found, root).removeprefix(".") in copied:  # The root itself is the folder "".
            return os.path.relpath(found, folder)
    return full


def linked(source: str, noted: Sequence[Any], to: str) -> bool:
    """Make a hard link to a file of another snapshot. False if that cannot be: it is gone, or not as noted."""
    try:
        if is_as_noted(source, noted) and stat.S_IMODE(os.lstat(source).st_mode) == noted[3]:
            os.link(source, to, follow_symlinks=False)
            return True
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    return False


def copy_of(source: BinaryIO, path: str, noted: Sequence[Any], to: str) -> None:
    """Copy ``source`` to ``to``, synced. Raises content.Changed if it is not what is noted of ``path``."""
    with open(to, "xb") as copy:
        if content.digest(source, copy) != noted[2]:
            raise content.Changed(path)
        copy.flush()
        os.fchmod(copy.fileno(), noted[3])
        os.utime(copy.fileno(), ns=(noted[1], noted[1]))
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


def is_as_noted(path: str, noted: Sequence[Any]) -> bool:
    """Whether a file of a snapshot has the size and the time that its marker says; or a link, whether it is one."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    if len(noted) == 1:
        return stat.S_ISLNK(found.st_mode)
    return stat.S_ISREG(found.st_mode) and (found.st_size, found.st_mtime_ns) == tuple(noted[:2])


def damaged(folder: str, found: Facts) -> list[str]:
    """Paths of the files in a snapshot that are not as its marker says."""
    changed = (path for path, noted in found.files.items() if not is_as_noted(os.path.join(folder, path), noted))
    return [path for path in changed if "__pycache__/" not in path]  # Python writes these anew.


def repair(folder: str, found: Facts, copy: Copy) -> None:
    """Copy again what a worker or the user has changed in the snapshot.

    Raises:
        LaunchError: a file has become a folder, or a folder a file.
    """
    for path in damaged(folder, found):
        parent, noted = os.path.join(folder, os.path.dirname(path)), found.files[path]
        part = os.path.join(parent, f"{old_copies.PART}{os.urandom(6).hex()}")
        try:
            os.makedirs(parent, exist_ok=True)
            if len(noted) == 1:
                os.symlink(noted[0], part)
            else:
                copy(path, noted, part)
            os.replace(part, os.path.join(folder, path))
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            _refuse(folder)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part)


def _link_others(root: str, folder: str, files: Iterable[str]) -> None:
    """Link what is beside the code and is not copied; links of an earlier time whose file is gone are removed."""
    for parent, names in folders_of(files).items():
        here = os.path.join(folder, parent)
        others = {entry.name for entry in old_copies.scan(os.path.join(root, parent))} - names - {".git", "__pycache__"}
        found = {entry.name for entry in old_copies.scan(here)} - names
        for name in found - others:
            if os.path.islink(os.path.join(here, name)):
                with contextlib.suppress(FileNotFoundError):  # Another command has removed it.
                    os.unlink(os.path.join(here, name))
        for name in others - found:
            with contextlib.suppress(FileExistsError):  # Another command has made it.
                os.symlink(os.path.join(root, parent, name), os.path.join(here, name))


def folders_of(files: Iterable[str]) -> dict[str, set[str]]:
    """The folders of the code, and in each the names of its files and folders of the code."""
    found: dict[str, set[str]] = {"": set()}
    for path in files:
        folder, name = os.path.split(path)
        while name and name not in (names := found.setdefault(folder, set())):
            names.add(name)
            folder, name = os.path.split(folder)
    return found


def written(folder: str) -> list[str]:
    """What is in a snapshot and is neither code nor a link, and files of the code that have changed; paths."""
    found = facts(folder)
    own = (MARKER, DIFF, "__pycache__")
    added = [
        os.path.relpath(entry.path, folder) + ("/" if entry.is_dir() else "")
        for parent, names in folders_of(found.files).items()
        for entry in os.scandir(os.path.join(folder, parent))
        if entry.name not in names and entry.name not in own and not os.path.islink(entry.path)
    ]
    return [*damaged(folder, found), *added]
