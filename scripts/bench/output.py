"""Wall time of a job whose workers print, with a log file per stream and prefixed lines on the console.

The console is a file. The benchmark checks ddplaunch's output: each line arrives whole, once, and in the order of its
rank, on the console and in the rank's log file.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from common import DDPLAUNCH, PROGRAMS, TORCHRUN, alternate, check_hosts, compared, print_table, seconds, size

WORKERS = 4
LINES = size("BENCH_LINES", 200_000, 100)
JOB = ("--nproc-per-node", str(WORKERS))
PROGRAM = (str(PROGRAMS / "print_lines.py"), str(LINES))


def shell(command: tuple[str, ...], console: Path) -> tuple[str, ...]:
    """``command`` with its stdout redirected to the file ``console``, as in a batch job."""
    return ("sh", "-c", 'exec "$@" >"$0"', str(console), *command)


def torchrun() -> float:
    with tempfile.TemporaryDirectory() as name:
        options = ("--tee", "3", "--log-dir", name)
        return seconds(shell((*TORCHRUN, *JOB, *options, *PROGRAM), Path(name) / "console"))


def ddplaunch() -> float:
    with tempfile.TemporaryDirectory() as name:
        console, logs = Path(name) / "console", Path(name) / "bench" / "attempt_0"
        options = ("--log-dir", name, "--rdzv-id", "bench")
        elapsed = seconds(shell((*DDPLAUNCH, *JOB, *options, *PROGRAM), console))
        check(console, r"\[[^]]+:(\d+)\] rank (\d+) step (\d+) loss 0\.693147 lr 0\.001000\n", LINES * WORKERS)
        for rank in range(WORKERS):
            check(logs / str(rank) / "stdout.log", r"(rank) (\d+) step (\d+) loss 0\.693147 lr 0\.001000\n", LINES)
        return elapsed


def check(path: Path, pattern: str, lines: int) -> None:
    """Exit unless ``path`` has ``lines`` lines that match ``pattern``, complete and in order for each rank."""
    steps = dict.fromkeys(map(str, range(WORKERS)), 0)
    with open(path) as file:
        for count, line in enumerate(file, start=1):
            found = re.fullmatch(pattern, line)
            if not found or found[1] not in ("rank", found[2]) or int(found[3]) != steps[found[2]]:
                sys.exit(f"{path}:{count} is not the next whole line of its rank: {line!r}")
            steps[found[2]] += 1
    if sum(steps.values()) != lines:
        sys.exit(f"{path} has {sum(steps.values())} lines instead of {lines}")


def main() -> None:
    check_hosts()
    medians = alternate(torchrun, ddplaunch)
    name = f"{WORKERS} workers x {LINES:,} lines, files and prefixed console"
    print_table("output", [compared(name, *medians)])


if __name__ == "__main__":
    main()
