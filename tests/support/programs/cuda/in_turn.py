"""Runs scripts one after the other in this process: ``in_turn.py --local-rank=N + SCRIPT [ARG...] [+ ...]``.

For the option --pass-local-rank, whose argument stands in place of LOCAL.
"""

import itertools
import os
import runpy
import sys
from pathlib import Path

print(f"ready (pid: {os.getpid()})", flush=True)
passed, *arguments = sys.argv[1:]
for is_separator, command in itertools.groupby(arguments, "+".__eq__):
    if not is_separator:
        sys.argv = [passed if word == "LOCAL" else word for word in command]
        runpy.run_path(str(Path(__file__).with_name(sys.argv[0])), run_name="__main__")
