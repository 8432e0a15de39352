"""The file of ``--metrics-file``: checked before a run starts, and renamed into place whenever it is written.

Runs in the launcher. Unlike the files of a run folder, others may read it, as far as the umask allows: Prometheus'
node_exporter is another user.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddplaunch.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

_HINT = "Its folder must exist, and you must be able to write to it."


def check(path: Path) -> None:
    """Raise OptionError if the file cannot be written, as far as that can be known."""
    if os.path.lexists(path) and not path.is_file():
        raise OptionError("--metrics-file", str(path), "is no regular file")  # A rename would replace it.
    try:
        os.close(_create(_part(path)))
        _part(path).unlink()
    except OSError as error:
        raise OptionError("--metrics-file", str(path), error.strerror or "cannot be written", _HINT) from None


def write(path: Path, content: str) -> None:
    """Write the whole file, and rename it into place.

    Raises:
        OSError: it cannot be written.
    """
    part = _part(path)
    try:
        with os.fdopen(_create(part), "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _create(part: Path) -> int:
    """A new file. Where others can write, one of them may have put a link there: it is not followed."""
    part.unlink(missing_ok=True)
    return os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _part(path: Path) -> Path:
    """node_exporter reads files whose names end in .prom only."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")
