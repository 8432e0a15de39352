"""Prints its cgroup v2 as the first thing it runs, and fails."""

import os
import sys
from pathlib import Path

lines = Path("/proc/self/cgroup").read_text().splitlines()
print("in", next(line for line in lines if line.startswith("0::")), flush=True)
print(f"ready (pid: {os.getpid()})", flush=True)
sys.exit(3)
