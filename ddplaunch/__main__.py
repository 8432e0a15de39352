"""Entry of ``python -m ddplaunch`` and of the ``ddplaunch`` command."""

import os
import sys


def main() -> None:
    """Run the command line; Ctrl-C is quiet from the first import on."""
    try:
        _open_standard_streams()
        from ddplaunch.cli import main as command_line
    except KeyboardInterrupt:
        sys.exit(130)
    command_line()


def _open_standard_streams() -> None:
    """After `<&-` or `2>&-` the next file or pipe would get that number, and be taken for the user's terminal."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


if __name__ == "__main__":
    main()
