"""Shared by the benchmarks: the commands of torchrun and ddplaunch, medians, and the result table."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROGRAMS = Path(__file__).parent / "programs"
REPEATS = int(os.environ.get("BENCH_REPEATS", "5"))
DDPLAUNCH = (str(Path(sys.executable).with_name("ddplaunch")),)
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")),)

_HOSTS_LINE = "::ffff:127.0.0.1 localhost"


def check_hosts() -> None:
    """Exit unless /etc/hosts resolves localhost: TCPStore clients look it up; slow DNS would dominate."""
    if not any(line.split()[:1] == ["::ffff:127.0.0.1"] for line in Path("/etc/hosts").read_text().splitlines()):
        sys.exit(f"first add the line `{_HOSTS_LINE}` to /etc/hosts, or the times include DNS look-ups")


def seconds(command: Sequence[str], env: dict[str, str] | None = None) -> float:
    """Wall time of ``command`` in seconds. A failure prints its output and exits."""
    started = time.perf_counter()
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(env or {})},
    )
    elapsed = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout.decode(errors='replace')}")
    return elapsed


def alternate(*measures: Callable[[], float], repeats: int = REPEATS) -> tuple[float, ...]:
    """Median of each measure. Measures take turns, so that other load on the machine affects all of them."""
    taken = [[measure() for measure in measures] for _ in range(repeats)]
    return tuple(statistics.median(column) for column in zip(*taken, strict=True))


def print_table(title: str, rows: Sequence[tuple[str, str, str, str]]) -> None:
    """Rows of (measure, torchrun, ddplaunch, ratio) as a Markdown table, with the machine and the date."""
    print(f"{title}: {os.cpu_count()} cores, {platform.machine()}, {time.strftime('%Y-%m-%d')}, medians of {REPEATS}\n")
    print("| measure | torchrun | ddplaunch | ratio |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def compared(measure: str, torchrun_s: float, ddplaunch_s: float) -> tuple[str, str, str, str]:
    """A table row that compares two times in seconds."""
    return measure, f"{torchrun_s:.2f} s", f"{ddplaunch_s:.2f} s", f"{torchrun_s / ddplaunch_s:.1f}x faster"
