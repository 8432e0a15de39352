"""Prints ``lines`` numbered lines (argument 1) of about ``width`` characters (argument 2) to stdout, and every tenth
number to stderr as well; then, if there is an argument 3, makes that file (``{rank}`` in it is the rank) and prints
``ready (pid: N)`` and sleeps until it is ended."""

import os
import sys
import time
from pathlib import Path

rank, lines, width = os.environ["RANK"], int(sys.argv[1]), int(sys.argv[2])
filling = "x" * (width - 20)
for number in range(lines):
    print(f"{rank}:{number:08d} {filling}")
    if number % 10 == 0:
        print(f"{rank}:{number:08d} error", file=sys.stderr)
if len(sys.argv) > 3:
    Path(sys.argv[3].format(rank=rank)).touch()
    print(f"ready (pid: {os.getpid()})")
    time.sleep(3600)
