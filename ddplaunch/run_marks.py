"""What the processes of a run are known by.

Everything below the launcher carries a mark in its environment (``environ.RUN_ID``): the run's id, for an id that the
user gave some letters that make it this run's alone, and of several nodes the number, as in ``job7.3f09ac.12``. The
launcher itself is what the user started, and its environment is as it was: it holds a file of memory whose name tells.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_NODE = re.compile(r"\.(0|[1-9][0-9]{0,4})$")
"""No longer than this: the letters may be six digits."""

_LETTERS = re.compile(r"\.[0-9a-f]{6}$")

_MARK = r"[\w.:@+-]{1,160}"
_BADGE = re.compile(rf"/memfd:ddplaunch-launcher-([0-9]+)-({_MARK})( \(deleted\))?", re.ASCII)


def is_mark(text: str) -> bool:
    """Whether a mark can read so; what is in an environment may be anybody's."""
    return bool(re.fullmatch(_MARK, text, re.ASCII))


def run_of(mark: str) -> str:
    """The mark without the number of the node: what is the same on all of them."""
    return _NODE.sub("", mark)


def id_of(mark: str) -> str:
    """The run's id, as the user knows it."""
    return _LETTERS.sub("", run_of(mark))


def names(mark: str) -> tuple[str, str]:
    """What the user may call the run by: its id, or what is this run's alone."""
    return id_of(mark), run_of(mark)


def new_mark(run_id: str, is_unique: bool) -> str:
    """What a sweep looks for is the run's alone, whatever the user called it."""
    return run_id if is_unique else f"{run_id}.{os.urandom(3).hex()}"


@contextlib.contextmanager
def badge(mark: str) -> Iterator[None]:
    """Show meanwhile, to who looks at this process's descriptors, that it is the launcher of the run."""
    try:
        # With our pid, since a fork of this process has the file too.
        fd = os.memfd_create(f"ddplaunch-launcher-{os.getpid()}-{mark}")
    except OSError:
        fd = -1
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def badges(pid: int) -> frozenset[str]:
    """Marks of the runs that process ``pid`` launches, by what its descriptors lead to."""
    with contextlib.suppress(OSError):
        matches = map(_BADGE.fullmatch, _targets(pid))
        return frozenset(match[2] for match in matches if match and int(match[1]) == pid)
    return frozenset()


def _targets(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        with contextlib.suppress(OSError):
            yield os.readlink(f"{folder}/{fd}")
