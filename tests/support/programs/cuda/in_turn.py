"""Runs scripts one after the other in this process: ``in_turn.py [+] SCRIPT [ARG...] [+ ...]``."""

import itertools
import os
import runpy
import sys
from pathlib import Path

print(f"ready (pid: {os.getpid()})", flush=True)
for is_separator, command in itertools.groupby(sys.argv[1:], "+".__eq__):
    if not is_separator:
        sys.argv = list(command)
        runpy.run_path(str(Path(__file__).with_name(sys.argv[0])), run_name="__main__")
