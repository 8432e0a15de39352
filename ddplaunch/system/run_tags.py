"""The run tag and the node tag, by which the processes of a run are found.

The run tag is the run id; if the user gave that id, a dot and six random hexadecimal digits follow, so that the tag is
unique. The node tag is the run tag; on one of several nodes a dot and the node's number follow: ``job7.3f09ac.12``.
Every process below the launcher has the node tag in its environment (``environment.RUN_ID``). The launcher's
environment is the user's, so it holds a memfd named after the run tag instead. Where each node has a launcher, each
launcher makes a run tag; if they also made the run ids, the nodes agree on one of them, and the launcher holds a second
memfd that names it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from ddplaunch.system import procfs

_NODE = re.compile(r"\.(0|[1-9][0-9]{0,4})$")
"""At most five digits: the six random digits of a run tag may all be decimal."""

_RANDOM_DIGITS = re.compile(r"\.[0-9a-f]{6}$")

_RUN_TAG = r"[\w.:@+-]{1,160}"
_LAUNCHER_MEMFD = re.compile(
    rf"/memfd:ddplaunch-launcher-([0-9]+)-({_RUN_TAG})(?:=({_RUN_TAG}))?( \(deleted\))?", re.ASCII
)

_MADE_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}", re.ASCII)


def new_run_tag(run_id: str, is_unique: bool) -> str:
    """The tag of a new run; ``is_unique``: no other run has this id."""
    return run_id if is_unique else f"{run_id}.{os.urandom(3).hex()}"


def is_made_id(text: str) -> bool:
    """Whether ``text`` looks like a run id that ddplaunch has made (``run_folder.new_run_id``)."""
    return bool(_MADE_ID.fullmatch(text))


def is_tag(text: str) -> bool:
    """Whether ``text``, from the environment of any process, can be a node tag."""
    return bool(re.fullmatch(_RUN_TAG, text, re.ASCII))


def run_tag_of(tag: str) -> str:
    """The run tag of a node tag: equal on all nodes of the run."""
    return _NODE.sub("", tag)


def run_id_of(tag: str) -> str:
    """The run id of a node tag or a run tag."""
    return _RANDOM_DIGITS.sub("", run_tag_of(tag))


def ids_of(tag: str) -> tuple[str, str]:
    """The texts by which a user can name the run: its id, and its run tag."""
    return run_id_of(tag), run_tag_of(tag)


@contextlib.contextmanager
def launcher_memfd(run_tag: str, run_id: str = "") -> Iterator[None]:
    """Hold a memfd named after the run in the ``with`` block; /proc/PID/fd then shows the launcher. Never raises.

    ``run_id``: the run id on which the nodes have agreed, if it is not that of ``run_tag``.
    """
    agreed = f"={run_id}" if run_id else ""
    try:
        # Named with this pid, since a fork of this process inherits the file.
        fd = os.memfd_create(f"ddplaunch-launcher-{os.getpid()}-{run_tag}{agreed}")
    except OSError:
        fd = -1
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def launcher_memfds(pid: int) -> dict[str, str]:
    """Run tags of the runs whose launcher is process ``pid``, each with its run id.

    Empty if its descriptors may not be read.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for match in map(_LAUNCHER_MEMFD.fullmatch, procfs.open_files(pid)):
            if match and int(match[1]) == pid and (match[3] or match[2] not in found):
                found[match[2]] = match[3] or run_id_of(match[2])
    return found
