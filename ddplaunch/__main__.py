"""Entry point of ``python -m ddplaunch`` and of the ``ddplaunch`` command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line. Ctrl-C shows no traceback, from the first import on."""
    try:
        _open_standard_streams()
        from ddplaunch.cli.main import main as command_line
    except KeyboardInterrupt:
        sys.exit(130)
    command_line()


def _open_standard_streams() -> None:
    """Open closed standard streams (`<&-`, `2>&-`) on /dev/null; otherwise the next file would get their number."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


if __name__ == "__main__":
    main()
