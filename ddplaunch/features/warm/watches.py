"""Watches what imports ask for: environment variables, modules that do not exist, the working directory.

Used by the keeper around its imports. Each watch is a context manager that adds names to a set.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HARMLESS_FOLDER_READERS = frozenset(
    # The first two are given the right folder later. The others ask for it to resolve a name that is not absolute, and
    # find none in it; tempfile tries it after all others.
    ("multiprocessing.process", "torch._dynamo.config", "torch._inductor.config", "inspect", "tempfile")
)

_RESOLVERS = ("os", "posixpath", "genericpath", "pathlib", "pathlib._local", __name__)
"""Modules that ask for the working directory for their caller."""


@contextlib.contextmanager
def reads(names: set[str]) -> Iterator[None]:
    """Note which variables are read through ``os.environ`` in the block."""
    plain = type(os.environ)

    class Noted(plain):  # type: ignore[valid-type,misc]
        def __getitem__(self, name: str) -> str:
            names.add(name)
            return str(super().__getitem__(name))

    os.environ.__class__ = Noted
    try:
        yield
    finally:
        os.environ.__class__ = plain


class searches:
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
def folder_reads(names: set[str]) -> Iterator[None]:
    """Note which modules ask for the working directory in the block."""
    plain = os.getcwd

    def noted() -> str:
        names.add(_caller())
        return plain()

    os.getcwd = noted
    try:
        yield
    finally:
        os.getcwd = plain


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__") in _RESOLVERS:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
