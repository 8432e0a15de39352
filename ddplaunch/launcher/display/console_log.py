"""console.log in the run folder: what the console shows, without colours and redrawn lines.

Runs in the launcher, in a thread of its own: neither a stopped terminal nor a slow disk holds up the other. The bytes
of the workers are kept as they are; messages are escaped by the console. At most two files of ``MAX_BYTES`` are kept.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.launcher.display.stream_writer import StreamWriter
from ddplaunch.system.files import kept_files
from ddplaunch.system.files.kept_files import keep_free

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.launcher.display.line_prefix import Style

FILE = "console.log"
EARLIER = "console.log.1"
"""What was written before the present ``FILE``."""

MAX_BYTES = 64 << 20
"""A file of this size becomes ``EARLIER`` at its next line end, and a new one is begun."""

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class ConsoleLog(StreamWriter):
    """The StreamWriter of console.log; it creates the file, and closes it when its thread ends."""

    def __init__(
        self,
        folder: Path,
        style: Style,
        on_error: Callable[[str], None] | None,
        *,
        reports_full_disk: bool,
        is_stdout: bool = False,
    ) -> None:
        """Create the file, or append to it.

        ``reports_full_disk``: a full disk is a problem for ``on_error``; if not, another part of the run reports it.
        ``is_stdout``: stdout and stderr of this process are the file, also after a new one is begun.

        Raises:
            OSError: the file cannot be created.
            RuntimeError: no room for a thread.
        """
        # A descriptor: the folder may be moved during the run.
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._reports_full_disk, self._is_stdout = reports_full_disk, is_stdout
        self._nbytes, self._is_at_line_end = 0, True
        self._fd = -1
        try:
            file = self._create()
            super().__init__(file, plain(style), on_error)
        except (OSError, RuntimeError):
            self._close()
            raise

    def _write_piece(self, data: memoryview) -> int:
        try:
            # A line without an end must not grow for ever.
            if self._nbytes >= (MAX_BYTES if self._is_at_line_end else 2 * MAX_BYTES):
                self._begin_next()
            elif not os.fstat(self._fd).st_nlink:  # It was deleted: nobody could read what follows.
                with contextlib.suppress(OSError):  # The folder, too.
                    self._replace()
            keep_free(self._fd, len(data))
            count = os.write(self._fd, data)
        except OSError as error:
            if error.errno in _DISK_FULL and not self._reports_full_disk:
                self._on_error = None
                kept_files.note_fd(self._fd, error)
            raise
        self._nbytes += count
        self._is_at_line_end = data[count - 1] == ord("\n")
        return count

    def _begin_next(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # Somebody has moved it.
            os.replace(FILE, EARLIER, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._replace()

    def _replace(self) -> None:
        file = self._create()
        for fd in (1, 2) if self._is_stdout else ():
            os.dup2(file, fd)
        kept_files.close(self._fd)
        self._fd, self._nbytes = file, 0

    def _write_all(self) -> None:
        super()._write_all()
        self._close()

    def _create(self) -> int:
        return kept_files.open_to_append(FILE, dir_fd=self._folder)

    def _close(self) -> None:
        for fd in (self._fd, self._folder):
            kept_files.close(fd)


def plain(style: Style) -> Style:
    """``style`` without colours."""
    return replace(style, colour=dict.fromkeys(style.colour, False))
