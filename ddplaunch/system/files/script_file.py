"""What kind of file a script is, and whether it can be run in the working directory."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from ddplaunch.errors import NODE_NOT_READY, LaunchError
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote


def is_plain(path: str) -> bool:
    """Whether the forkserver can run ``path``; a folder, an archive or a compiled file needs a new interpreter."""
    try:
        return b"\0" not in Path(path).read_bytes()
    except OSError:
        return False


def check_readable(path: str, host: str) -> None:
    """Check that workers on this machine, whose display name is ``host``, can run the script ``path``.

    Raises:
        LaunchError: it is missing or not readable, or it is no regular file and no folder with ``__main__.py``.
    """
    if os.path.isdir(path):
        if os.path.isfile(os.path.join(path, "__main__.py")):
            return
        raise LaunchError(f"{path}: is a folder on {host}", "Give the script itself, or a package with -m.")
    try:
        with kept_files.open_regular(path):
            return
    except FileNotFoundError:
        raise LaunchError(f"{path}: no such file on {host}", _hint_to_find(path)) from None
    except kept_files.NotRegular:
        raise LaunchError(
            f"{path}: is not a regular file on {host}", "Every worker reads the script: save it to a file."
        ) from None
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror} on {host}", "Check the file's permissions.") from None


def _hint_to_find(path: str) -> str:
    from difflib import get_close_matches

    if re.fullmatch(r"python[\d.]*", path):
        return f"Leave out {path}: ddplaunch runs the script with its Python. A program is started with --no-python."
    with contextlib.suppress(OSError):
        folder, name = os.path.split(path)
        if near := get_close_matches(name, os.listdir(folder or "."), n=1, cutoff=0.8):
            return f"Did you mean {quote(os.path.join(folder, near[0]))}?"
    return f"It is looked for in {working_folder()}. A module is started with -m, a program with --no-python."


def working_folder() -> str:
    """Path of the current working directory.

    Raises:
        LaunchError: the directory has been deleted.
    """
    try:
        return os.getcwd()
    except OSError as error:
        hint = "The directory was deleted, and perhaps created again: `cd` into it once more."
        raise LaunchError(f"the working directory: {error.strerror}", hint, NODE_NOT_READY) from None
