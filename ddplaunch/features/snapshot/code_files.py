"""Which files are the code of a run: those that git lists in the repository, or else in the folder, of the script.

Runs in the process of the command, before the run. Starts git; only reads, but for a repository without a commit of its
own that a folder outside of any repository gets meanwhile, in the temporary files.
"""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ddplaunch.errors import LaunchError, UsageError
from ddplaunch.features.snapshot.records import DIFF, MARKER
from ddplaunch.system.files import run_folder
from ddplaunch.system.files.script_file import working_folder
from ddplaunch.text import plural, quote, size

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

MAX_BYTES = 1 << 30
MAX_FILES = 100_000
IGNORE_FILE = ".ddplaunchignore"
"""In the root, also in that of a submodule: names, as in .gitignore, what is not copied though git has it."""

_NOT_CODE = ("__pycache__", ".git", MARKER, DIFF)
_OF_REPOSITORY = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE"),
)
"""Set by git for a hook: they would name another repository."""


class Repository(NamedTuple):
    """Where the code is. ``commit`` and ``branch`` are empty outside of a repository, or if there is none yet."""

    root: str
    is_git: bool
    commit: str = ""
    branch: str = ""


class CodeFile(NamedTuple):
    """A file or link of the code; two of one path are equal if it has not changed in between.

    Attributes:
        path: relative to the root.
        target: of a link, as it stands there; empty for a file.
        is_tracked: git has it.
    """

    path: str
    mode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    target: str = ""
    is_tracked: bool = False


def folder_of(config: LaunchConfig) -> str:
    """The folder of the script; of a module or a text, the working directory of the workers."""
    here = os.path.abspath(config.chdir or working_folder())
    return os.path.dirname(os.path.join(here, config.script_file)) if config.script_file else here


def repository_of(folder: str) -> Repository:
    """The repository that has ``folder``, or the folder itself.

    Raises:
        LaunchError: git is missing or refuses the repository.
        UsageError: the code would be the whole home folder, or all files of the machine.
    """
    code, root, error = _run_git(folder, "rev-parse", "--show-toplevel")
    if code and "not a git repository" not in error:
        raise LaunchError(f"--snapshot: git refuses {folder}: {quote(error.strip(), 500)}")
    found = os.path.realpath(folder if code else os.fsdecode(root[:-1]))
    if found in ("/", os.path.realpath(os.path.expanduser("~"))):
        hint = "Put it into a folder of its own, or into a git repository."
        raise UsageError(f"--snapshot: the code would be all of {found}, since the script is there", hint)
    if code:
        return Repository(found, is_git=False)
    _, commit, _ = _run_git(found, "rev-parse", "--quiet", "--verify", "HEAD")
    _, branch, _ = _run_git(found, "symbolic-ref", "--quiet", "--short", "HEAD")
    return Repository(found, True, commit.decode().strip(), os.fsdecode(branch).strip())


def diff(repository: Repository) -> bytes:
    """What differs from the commit, as ``git diff`` shows it. Empty without a commit."""
    if not repository.commit:
        return b""
    _, text, _ = _run_git(repository.root, "diff", "--no-color", "--no-ext-diff", "--no-textconv", repository.commit)
    return text


def changed_since(folder: str, time_ns: int) -> list[str]:
    """Paths of the files in the repository of ``folder`` that have changed later: those that git has, and modules.

    Empty outside of a repository. The time is the wall clock, in nanoseconds since 1970.

    Raises:
        LaunchError: git is missing, or fails.
    """
    repository = repository_of(folder)
    if not repository.is_git:
        return []
    newer = (file for file in _listed(repository) if file.mtime_ns > time_ns)
    return [file.path for file in newer if file.is_tracked or file.path.endswith(".py")]


def of_run(repository: Repository, include: Sequence[str], without: Sequence[str]) -> dict[str, CodeFile]:
    """The files and links of the code, by path.

    Args:
        repository: where they are.
        include: absolute paths of files and folders that are code, too.
        without: absolute paths of folders that are not, as that of the snapshots.

    Raises:
        UsageError: ``include`` is not in the folder; or there are too many files or bytes.
        LaunchError: git fails.
    """
    root = repository.root
    skipped = {os.path.relpath(path, root) for path in without if path.startswith(root + "/")}
    found = {file.path: file for file in _listed(repository)} | {
        file.path: file for path in include for file in _included(root, path)
    }
    skipped |= {os.path.dirname(path) for path in found if os.path.basename(path) == run_folder.LOCK}
    files = {
        path: file
        for path, file in found.items()
        if not any(name in _NOT_CODE for name in path.split("/")) and skipped.isdisjoint(_upwards(path))
    }
    _check_size(root, files.values())
    return files


def _upwards(path: str) -> Iterator[str]:
    """The path, and the folders that it is in."""
    while path:
        yield path
        path = os.path.dirname(path)


def _listed(repository: Repository) -> Iterator[CodeFile]:
    if repository.is_git:
        yield from _listed_by_git(repository.root, "", {})
        return
    with tempfile.TemporaryDirectory(prefix="ddplaunch-") as folder:
        variables = {"GIT_DIR": folder, "GIT_WORK_TREE": repository.root}
        _git(repository.root, "init", "--quiet", "--template=", more=variables)
        yield from _listed_by_git(repository.root, "", variables)


def _listed_by_git(root: str, prefix: str, variables: dict[str, str]) -> Iterator[CodeFile]:
    folder = os.path.join(root, prefix)
    more = (f"--exclude-from={IGNORE_FILE}",) if os.path.isfile(os.path.join(folder, IGNORE_FILE)) else ()
    command = ("ls-files", "-z", "-t", "--cached", "--others", "--exclude-standard", *more)
    dropped = set(_git(folder, "ls-files", "-z", "-c", "-i", *more, more=variables).split(b"\0")) if more else ()
    for line in _git(folder, *command, more=variables).split(b"\0"):
        tag, _, name = line.partition(b" ")
        if not name or name in dropped:
            continue
        path = prefix + os.fsdecode(name).rstrip("/")
        file = _look(root, path, is_tracked=tag != b"?")
        if file and stat.S_ISDIR(file.mode) and os.path.lexists(os.path.join(root, path, ".git")):
            yield from _listed_by_git(root, path + "/", {})  # A submodule, or a repository in the repository.
        elif file and not stat.S_ISDIR(file.mode):
            yield file


def _look(root: str, path: str, *, is_tracked: bool) -> CodeFile | None:
    """The file, link or folder; None if it is missing, as one that git still has, or something else."""
    full = os.path.join(root, path)
    try:
        found = os.lstat(full)
        target = os.readlink(full) if stat.S_ISLNK(found.st_mode) else ""
    except OSError:
        return None
    if not (target or stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return None
    times = (found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
    return CodeFile(path, found.st_mode, found.st_size, *times, target, is_tracked)


def _included(root: str, path: str) -> Iterator[CodeFile]:
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    if not real.startswith(root + "/") or not os.path.lexists(real):
        problem = "is not in the folder of the code" if os.path.lexists(real) else "no such file or folder"
        raise UsageError(f"--snapshot-include {quote(path)}: {problem}", f"The code is in {root}.")
    for each in _below(real):
        file = _look(root, os.path.relpath(each, root), is_tracked=False)
        if file and not stat.S_ISDIR(file.mode):
            yield file


def _below(path: str) -> Iterator[str]:
    """The path and, of a folder, all that is in it."""
    yield path
    if not os.path.islink(path):
        for folder, folders, names in os.walk(path):
            yield from (os.path.join(folder, name) for name in (*folders, *names))


def is_unchanged(root: str, file: CodeFile) -> bool:
    """Whether it is as it was when it was listed."""
    return _look(root, file.path, is_tracked=file.is_tracked) == file


def _check_size(root: str, files: Collection[CodeFile]) -> None:
    nbytes = sum(file.size for file in files)
    if nbytes <= MAX_BYTES and len(files) <= MAX_FILES:
        return
    sizes: dict[str, list[int]] = {}
    for file in files:
        of_top = sizes.setdefault(file.path.split("/")[0], [0, 0])
        of_top[0] += file.size
        of_top[1] += 1
    column = 0 if nbytes > MAX_BYTES else 1
    biggest = sorted(sizes, key=lambda name: -sizes[name][column])[:3]
    named = ", ".join(f"{quote(name)} ({size(sizes[name][0])}, {plural(sizes[name][1], 'file')})" for name in biggest)
    raise UsageError(
        f"--snapshot: {root} has {size(nbytes)} of code in {plural(len(files), 'file')}, mostly {named}; "
        f"a snapshot has at most {size(MAX_BYTES)} and {MAX_FILES} files",
        f"Name what is no code in .gitignore or {IGNORE_FILE}: it is found by a link all the same.",
    )


def _git(folder: str, *arguments: str, more: dict[str, str]) -> bytes:
    code, output, error = _run_git(folder, *arguments, more=more)
    if code:
        raise LaunchError(f"--snapshot: git {arguments[0]} fails in {folder}: {quote(error.strip(), 500)}")
    return output


def _run_git(folder: str, *arguments: str, more: dict[str, str] | None = None) -> tuple[int, bytes, str]:
    """Exit code, stdout and stderr of a git command that takes no locks."""
    environ = {name: value for name, value in os.environ.items() if name not in _OF_REPOSITORY}
    environ |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", **(more or {})}
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], env=environ, capture_output=True, check=False)
    except FileNotFoundError:
        hint = "It says which files are code, and which are ignored."
        raise LaunchError("--snapshot: git is not installed on this machine", hint) from None
    except OSError as error:
        raise LaunchError(f"--snapshot: git cannot be started: {error.strerror}") from None
    return done.returncode, done.stdout, done.stderr.decode("utf-8", "replace")
