"""Size of run.html, and time and memory to make it, for 8, 512 and 4,096 ranks over 24 hours.

The run folders are made up (``tests/support/run_folders.py``): two attempts, a lost node, and as many usage samples as
are kept of a day (see docs/samples.md).
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import REPEATS, size

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from tests.support import run_folders

LINES = 360
"""Samples of a node: 2 s for 3 minutes, then 30 s for an hour, then 600 s for a day."""

NODES = size("BENCH_NODES", (1, 64, 512), (1,))


def made(folder: Path) -> tuple[float, float, float]:
    """Make the page in a new process: seconds, CPU seconds, and MB of memory at most."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    # ru_maxrss would also count the memory of this process, from which the new one is forked.
    code = (
        "from ddplaunch.features.page.make import main; main(); "
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], input=b"\n", capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, cpu_s, int(done.stdout) / 1024


def main() -> None:
    """Print the table."""
    rows = []
    for nodes in NODES:
        with tempfile.TemporaryDirectory() as base:
            folder = run_folders.write(Path(base) / "run", nodes=nodes, hours=24, lines=LINES)
            samples = sum(path.stat().st_size for path in (folder / "samples").iterdir())
            figures = [made(folder) for _ in range(REPEATS)]
            wall_s, cpu_s, memory = (statistics.median(values) for values in zip(*figures, strict=True))
            page = (folder / "run.html").stat().st_size
        times = (f"{wall_s:.2f} s", f"{cpu_s:.2f} s", f"{memory:.0f} MB")
        rows.append((f"{nodes * 8:,}", f"{samples / 1e6:.1f} MB", f"{page / 1e3:.0f} kB", *times))
    print(f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, medians of {REPEATS}\n")
    print("| ranks, 24 h | samples | run.html | time | CPU time | memory |\n|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
