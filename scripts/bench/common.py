"""Shared by the benchmarks: the commands of torchrun and ddplaunch, sizes, medians, and the result table.

``BENCH_SMALLEST=1`` gives each benchmark its smallest size: its figures mean nothing, but it shows that it runs.
torchrun, which imports torch in each process, is then left out, or ddplaunch takes its part.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T", int, float, tuple[int, ...])

IS_SMALLEST = os.environ.get("BENCH_SMALLEST", "") not in ("", "0")


def size(variable: str, usual: T, smallest: T) -> T:
    """The size that the environment's ``variable`` has, like 5 or 1,64,512; else the usual or the smallest."""
    if text := os.environ.get(variable):
        return tuple(map(int, text.split(","))) if isinstance(usual, tuple) else type(usual)(text)
    return smallest if IS_SMALLEST else usual


PROGRAMS = Path(__file__).parent / "programs"
REPEATS = size("BENCH_REPEATS", 5, 1)
DDPLAUNCH = (str(Path(sys.executable).with_name("ddplaunch")),)
TORCHRUN = DDPLAUNCH if IS_SMALLEST else (str(Path(sys.executable).with_name("torchrun")),)

_HOSTS_LINE = "::ffff:127.0.0.1 localhost"


def check_hosts() -> None:
    """Exit unless /etc/hosts resolves localhost: TCPStore clients look it up; slow DNS would dominate."""
    if not IS_SMALLEST and not any(
        line.split()[:1] == ["::ffff:127.0.0.1"] for line in Path("/etc/hosts").read_text().splitlines()
    ):
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
    """Median of each measure. Measures take turns, so that other load on the machine affects all of them.

    The first is torchrun's, which the smallest size leaves out.
    """
    if IS_SMALLEST:
        return float("inf"), *(measure() for measure in measures[1:])
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
