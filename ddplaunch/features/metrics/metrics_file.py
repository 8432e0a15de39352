"""The file of ``--metrics-file``: checked before a run starts, and renamed into place whenever it is written.

Runs in the launcher. Unlike the files of a run folder, others may read it, as far as the umask allows: Prometheus'
node_exporter is another user.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.errors import OptionError
from ddplaunch.system.files import kept_files

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

_HINT = "Its folder must exist, and you must be able to write to it."


def prepare(config: LaunchConfig) -> LaunchConfig:
    """Before the run: raise OptionError if the file cannot be written, as far as that can be known."""
    path = Path(config.output.metrics_file or "").absolute()
    if os.path.lexists(path) and not os.path.isfile(path):
        raise OptionError("--metrics-file", str(path), "is no regular file")  # A rename would replace it.
    try:
        fd, part = kept_files.new_part(path)
        os.close(fd)
        os.unlink(part)
    except OSError as error:
        raise OptionError("--metrics-file", str(path), error.strerror or "cannot be written", _HINT) from None
    return config


def write(path: Path, content: str) -> None:
    """Write the whole file, and rename it into place.

    Raises:
        OSError: it cannot be written.
    """
    kept_files.write_whole(path, content, 0o666)
