"""The folder in which workers of ``--sync`` run: it shows the code, and keeps what they write. Runs in an agent."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ddplaunch.errors import LaunchError
from ddplaunch.features.snapshot import copies
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.features.snapshot.copies import Facts

_MAX_LINKS = 3


def link(folder: str, work: str, cwd: str, found: Facts, sender: str, on_link: Callable[[], None]) -> str:
    """Have ``work`` show the code: the same folders, with links to the files of the snapshot ``folder``.

    What a worker writes into a folder of the code is thus found beside other code, too. All links lead through one
    beside ``work``, which leads to the snapshot: of code with other contents, only that one changes. They are noted in
    a file there, so that those of older code are removed, and nothing else; and who has sent the code. Returns who had
    sent that which was there before. Calls ``on_link`` for each link that is made.

    Raises:
        LaunchError: a worker, or the user, has put something else there.
    """
    code, note = f"{work}.code", f"{work}.links.json"
    links = {
        path: noted[0] if _leads_inside(noted) else os.path.join(code, path) for path, noted in found.files.items()
    }
    folders = copies.folders_of([*links, os.path.join(cwd, ".")])
    os.makedirs(work, mode=0o700, exist_ok=True)
    before, sender_before = _read_note(note)
    for path, target in before.items():
        if links.get(path) != target and _target(os.path.join(work, path)) == target:
            os.unlink(os.path.join(work, path))
    for old in sorted(copies.folders_of(before).keys() - folders, reverse=True):
        with contextlib.suppress(OSError):  # A worker has written into it.
            os.rmdir(os.path.join(work, old))
    kept_files.write_whole(note, json.dumps({"links": links, "sender": sender}))
    if _target(code) != folder:
        with contextlib.suppress(FileNotFoundError):  # Of a process that was killed here.
            os.unlink(f"{code}.part")
        os.symlink(folder, f"{code}.part")
        os.replace(f"{code}.part", code)
    try:
        for each in sorted(folders):
            os.makedirs(here := os.path.join(work, each), mode=0o700, exist_ok=True)
        for path, target in links.items():
            if _target(here := os.path.join(work, path)) != target:
                os.symlink(target, here)
                on_link()
    except (FileExistsError, NotADirectoryError):
        problem = f"{here} is in the way: the code has a file or folder of this name"
        raise LaunchError(problem) from None
    return sender_before or sender


def _read_note(path: str) -> tuple[dict[str, str], str]:
    """The links that were made last, and whose code they show; both empty if there are none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), kept_files.open_regular(path) as file:
        found = json.loads(file.read())
        return dict(found["links"]), str(found["sender"])
    return {}, ""


def _target(path: str) -> str:
    """Where a link leads; of what is no link, empty."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _leads_inside(noted: Sequence[Any]) -> bool:
    """Whether this is a link of the code to what is copied, too."""
    return len(noted) == 1 and not noted[0].startswith("/")


def dangling(folder: str, found: Facts) -> list[str]:
    """Links of the code that lead out of it to what is not here; the first ones."""
    links = (path for path, noted in found.files.items() if len(noted) == 1 and re.match("/", noted[0]))
    missing = (path for path in links if not os.path.exists(os.path.join(folder, path)))
    return [quote(path, 500) for _, path in zip(range(_MAX_LINKS), missing, strict=False)]
