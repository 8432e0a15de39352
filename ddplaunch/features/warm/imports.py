"""What a keeper has imported, and whether the imports of a new process would give the same.

Runs in the keeper, and in the forkserver that is forked from it. The environment variables that the imports read are
noted, since a run with other values must import for itself.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import sys
import sysconfig
import time
import zipimport
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import machinery
from typing import TYPE_CHECKING, Any

from ddplaunch.features.warm import surroundings
from ddplaunch.protocol.agent_entry import PACKAGE_ROOT
from ddplaunch.system import procfs
from ddplaunch.worker import preload

if TYPE_CHECKING:
    from types import ModuleType

_AT_START = ("sitecustomize", "usercustomize")
"""Modules that the interpreter imports when it starts, if it finds them."""


class Imports:
    """What has been imported, from which files, and under which environment.

    Attributes:
        environ: the environment before the imports, as ``surroundings.digests``.
        hidden: variables that this process does not have until an import reads them, as ``surroundings.environ_file``
            has them; None once they are gone.
        variables: names of the variables that Python code has read.
        top_level: the first parts of the names of imported modules.
        missing: the first parts of the names of modules that were not found.
        folder_readers: the modules that have asked for the working directory.
        files: each file of a module or library that was loaded -> its stamp.
        since: when the first of them was loaded, by the clock of files, in seconds.
    """

    def __init__(self, environ: dict[str, str], since: float | None = None) -> None:
        """``since``: by default, the start of this process."""
        self.environ = environ
        self.hidden: mmap.mmap | None = None
        self.variables, self.top_level, self.folder_readers = set[str](), set[str](), set[str]()
        self.missing = {*_AT_START}
        self.files: dict[str, str] = {}
        self.since = time.time() - procfs.age_s("self") if since is None else since

    def run(self, modules: Iterable[str], required: Iterable[str]) -> str:
        """Import ``modules``, in order. Returns why this process cannot be a keeper; empty if it can."""
        with (
            preload.without_collection(),
            _noting_reads(self.variables, self._revealed, self._reveal_all),
            _NotingSearches(self.missing),
            _noting_folder_reads(self.folder_readers),
        ):
            for module in modules:
                error = preload.try_import(module)
                if error and module in required:
                    return f"{module} cannot be imported: {type(error).__name__}: {error}"
        reader = next(iter(sorted(self.folder_readers - _HARMLESS_FOLDER_READERS)), "")
        return f"{reader} asks for the working directory when it is imported" if reader else ""

    def _revealed(self, name: str) -> str:
        """The value of a variable that an import reads and this process does not have.

        Raises:
            KeyError: there is none, or it is gone: it is now compared as one that did not exist.
        """
        mark = b"\0" + os.fsencode(name) + b"="
        at = self.hidden.find(mark) if self.hidden else -1
        if self.hidden is None or at < 0:
            self.environ.pop(name, None)
            raise KeyError(name)
        os.environ[name] = value = os.fsdecode(self.hidden[at + len(mark) : self.hidden.find(b"\0", at + 1)])
        return value

    def _reveal_all(self) -> None:
        """For an import that goes through all variables."""
        own = {os.fsdecode(name) for name in os.environ._data}  # type: ignore[attr-defined]
        for name in self.environ.keys() - own if self.hidden else ():
            self._revealed(name)

    def hide(self, fd: int) -> None:
        """Have the variables in the file ``fd``, which is closed, without a copy of them on the heap."""
        self.hidden = mmap.mmap(-1, os.fstat(fd).st_size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        os.preadv(fd, [self.hidden], 0)
        os.close(fd)

    def forget_hidden(self) -> None:
        """Give up the variables that no import has read."""
        if self.hidden:
            self.hidden.close()
        self.hidden = None

    def note(self) -> str:
        """Note all modules and libraries that are loaded. Returns why this process cannot be a keeper."""
        own = tuple(folder + "/" for folder in _folders_of_packages())
        files = {*_mapped_files()}
        for name, module in tuple(sys.modules.items()):
            if name in ("__main__", "ddplaunch"):
                continue
            self.top_level.add(name.partition(".")[0])
            for path in _paths(module):
                if not path.startswith(own):
                    return f"{name} comes from {path}, which is not a folder of installed packages"
            files |= {*filter(None, [_file(module)])}
        self.top_level.discard("ddplaunch")
        return self._note_files(files - self.files.keys())

    def _note_files(self, files: set[str]) -> str:
        for path in files:
            self.files[path] = surroundings.stamp(path)
            if self.since <= surroundings.written_s(path) <= time.time():  # Before or after it was read?
                return f"{path} has changed while it was imported"
        return ""

    def difference(self, environ: Mapping[str, str], ignored: Iterable[str] = ()) -> str:
        """The first variable whose value the imports could have noticed, and that is another in ``environ``.

        Empty for none. ``environ`` is as ``surroundings.digests``.
        """
        names = {name for name in environ.keys() | self.environ.keys() if name.startswith(surroundings.READ_IN_C)}
        for name in sorted((names | self.variables).difference(ignored)):
            if environ.get(name) != self.environ.get(name):
                return name
        return ""

    def changed_file(self) -> str:
        """The first file of an imported module that has changed since; empty for none."""
        return next((path for path, stamp in self.files.items() if surroundings.stamp(path) != stamp), "")

    def hidden_by(self, folders: Iterable[str]) -> str:
        """A file or folder in ``folders`` that a new process would import in place of an imported module."""
        for folder in folders:
            for name in _listed(folder):
                if self._is_hidden_by(name.partition(".")[0], f"{folder}/{name}"):
                    return f"{folder}/{name}"
        return ""

    def _is_hidden_by(self, module: str, path: str) -> bool:
        if module not in self.top_level and module not in self.missing:
            return False
        suffix = os.path.basename(path)[len(module) :]
        if suffix or not os.path.isdir(path):  # A folder with a dot in its name is no package.
            return suffix in machinery.all_suffixes() and not os.path.isdir(path)
        # A folder without __init__.py is a package only where no other is found.
        return module in self.missing or os.path.exists(f"{path}/__init__.py")


def forget_folders() -> None:
    """Forget what the folders and archives of ``sys.path`` held, except those of installed packages.

    Their contents may have changed with their times as before: archives have an index, file systems count in seconds.
    """
    own = [folder + "/" for folder in _folders_of_packages()]
    for path in [path for path in sys.path_importer_cache if not f"{path}/".startswith(tuple(own))]:
        del sys.path_importer_cache[path]
    zipimport._zip_directory_cache.clear()  # type: ignore[attr-defined]


def user_folders() -> list[str]:
    """The folders of ``sys.path`` that hold no installed packages: those of PYTHONPATH and of editable packages."""
    own = {*_folders_of_packages(), PACKAGE_ROOT}
    return [folder for folder in sys.path if folder not in own and os.path.isdir(folder)]


def _folders_of_packages() -> list[str]:
    """The folders of the standard library, of installed packages, and of this package."""
    standard = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)]
    dynamic = [path for path in sys.path if path.endswith("lib-dynload")]
    return [*standard, *dynamic, *surroundings.package_folders(), f"{PACKAGE_ROOT}/ddplaunch"]


def _paths(module: ModuleType) -> Iterator[str]:
    """The files or folders from which a module was imported; none for one that is built in or made by a program."""
    file = _file(module)
    if file:
        yield file
        return
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.origin is None and spec.loader is not None:  # A package without __init__.py.
        yield from (path for path in spec.submodule_search_locations or () if os.path.isabs(path))


def _file(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and os.path.isabs(file) else ""


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _mapped_files() -> Iterator[str]:
    """The files in the memory of this process: the interpreter, libraries."""
    for line in os.fsdecode(procfs.read("/proc/self/maps")).splitlines():
        if match := re.search(r" [1-9][0-9]* +(/.*)$", line):  # The file's number; 0 for memory without a file.
            yield match[1]


# What imports ask for: environment variables, modules that do not exist, the working directory.

_HARMLESS_FOLDER_READERS = frozenset(
    # The first two are given the right folder later. The others ask for it to resolve a name that is not absolute, and
    # find none in it; tempfile tries it after all others.
    ("multiprocessing.process", "torch._dynamo.config", "torch._inductor.config", "inspect", "tempfile")
)

_RESOLVERS = ("os", "posixpath", "genericpath", "pathlib", "pathlib._local", __name__)
"""Modules that ask for the working directory for their caller."""


@contextlib.contextmanager
def _noting_reads(names: set[str], missing: Callable[[str], str], before_all: Callable[[], None]) -> Iterator[None]:
    """Note which variables are read through ``os.environ`` in the block, and ask ``missing`` for what is not there.

    ``before_all`` is called before code goes through all of them.
    """
    plain = type(os.environ)

    class Noted(plain):  # type: ignore[valid-type,misc]
        def __getitem__(self, name: str) -> str:
            names.add(name)
            try:
                return str(super().__getitem__(name))
            except KeyError:
                return missing(name)

        def __iter__(self) -> Iterator[str]:
            before_all()
            return iter(list(super().__iter__()))

    os.environ.__class__ = Noted
    try:
        yield
    finally:
        os.environ.__class__ = plain


class _NotingSearches:
    """Note which top-level modules are not found in the block."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def __enter__(self) -> None:
        sys.meta_path.append(self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, name: str, _path: object, _target: object = None) -> None:
        self._names.add(name.partition(".")[0])


@contextlib.contextmanager
def _noting_folder_reads(names: set[str]) -> Iterator[None]:
    """Note which modules ask for the working directory in the block."""
    import pathlib

    plain = os.getcwd
    # In Python 3.10, pathlib has a reference of its own.
    places: list[Any] = [os, *filter(None, [getattr(pathlib, "_NormalAccessor", None)])]

    def noted() -> str:
        names.add(_caller())
        return plain()

    for place in places:
        place.getcwd = staticmethod(noted)
    try:
        yield
    finally:
        for place in places:
            place.getcwd = plain


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__") in _RESOLVERS:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
