"""Entry point of ``python -m ddplaunch`` and of the ``ddplaunch`` command."""

from __future__ import annotations

import gc
import os
import sys

from ddplaunch.protocol.agent_entry import COLLECT_AFTER, use_own_search_path


def main(*, by_module: bool = False) -> None:
    """Run the command line; ``by_module``: of ``python -m``. Ctrl-C shows no traceback, from the first import on."""
    try:
        gc.set_threshold(COLLECT_AFTER)
        use_own_search_path(drop_first=by_module)
        _open_standard_streams()
        from ddplaunch.cli.main import main as command_line
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        command_line()
    finally:
        gc.freeze()  # Else the end of the interpreter searches all objects for garbage, twice.


def _open_standard_streams() -> None:
    """Open closed standard streams (`<&-`, `2>&-`) on /dev/null; otherwise the next file would get their number."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


if __name__ == "__main__":
    main(by_module=True)
