"""Makes the page of the run folder that is its argument, in a child process of the launcher.

It loads its modules, and begins when a byte comes on stdin. Where every node has a launcher, each makes the page of its
node, and one of them that of the whole run, too.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

LIMIT_S = 60
"""Seconds after which the process ends by itself: on a file system that hangs, nobody waits for it."""


def main() -> None:
    """Make the page; an error of the disk ends with 1. At the end of stdin the launcher has gone: nothing is made."""
    os.nice(19)
    from ddplaunch.features.page.make import make, whole_run

    if not os.read(0, 1):
        return
    signal.alarm(LIMIT_S)
    folder = Path(sys.argv[1])
    try:
        make(folder)
        if whole := whole_run(folder):
            make(whole)
    except OSError as error:
        sys.exit(f"{error}")


if __name__ == "__main__":
    main()
