"""Cost of a running job: memory (PSS) of all processes, CPU time and wake-ups of an idle launcher and agent.

The job has 8 workers that have imported torch and then sleep.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from common import DDPLAUNCH, PROGRAMS, REPEATS, TORCHRUN, check_hosts, print_table, size

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKERS = size("BENCH_WORKERS", 8, 2)
IDLE_S = size("BENCH_IDLE_S", 30.0, 0.2)


@contextlib.contextmanager
def job(command: tuple[str, ...]) -> Iterator[psutil.Process]:
    """Run a job whose workers sleep; yields the launcher."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            (*command, "--nproc-per-node", str(WORKERS), str(PROGRAMS / "idle.py")),
            env={**os.environ, "READY": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + 120
            while len(os.listdir(folder)) < WORKERS:
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"{command[0]} did not start the job")
                time.sleep(0.1)
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def pss_mb(process: psutil.Process) -> float:
    return process.memory_full_info().pss / 2**20


def supervisors(launcher: psutil.Process) -> list[psutil.Process]:
    """The launcher, and for ddplaunch the agent."""
    agents = [child for child in launcher.children() if "ddplaunch" in " ".join(child.cmdline())]
    return [launcher, *agents]


def wake_ups(process: psutil.Process) -> int:
    """Voluntary context switches of all threads of ``process``."""
    total = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        status = (task / "status").read_text()
        total += int(status.split("voluntary_ctxt_switches:")[1].split()[0])
    return total


def measure(command: tuple[str, ...]) -> tuple[list[float], float]:
    """PSS in MB: of the launcher and the agent, and of the whole process tree."""
    with job(command) as launcher:
        tree = [launcher, *launcher.children(recursive=True)]
        return [pss_mb(process) for process in supervisors(launcher)], sum(map(pss_mb, tree))


def idle_cost(command: tuple[str, ...]) -> tuple[float, float]:
    """Percent of a core, and wake-ups per second, of launcher and agent together."""
    with job(command) as launcher:
        watched = supervisors(launcher)
        time.sleep(1)
        before = [(sum(p.cpu_times()[:2]), wake_ups(p)) for p in watched]
        time.sleep(IDLE_S)
        after = [(sum(p.cpu_times()[:2]), wake_ups(p)) for p in watched]
        cpu_s = sum(b[0] - a[0] for a, b in zip(before, after, strict=True))
        return 100 * cpu_s / IDLE_S, sum(b[1] - a[1] for a, b in zip(before, after, strict=True)) / IDLE_S


def main() -> None:
    check_hosts()
    commands = dict.fromkeys((TORCHRUN, DDPLAUNCH))  # One at the smallest size.
    memory = {command: [measure(command) for _ in range(REPEATS)] for command in commands}
    cost = {command: idle_cost(command) for command in commands}
    total = {command: statistics.median(whole for _, whole in runs) for command, runs in memory.items()}
    parts = [statistics.median(column) for column in zip(*(own for own, _ in memory[DDPLAUNCH]), strict=True)]
    torchrun_mb = statistics.median(own[0] for own, _ in memory[TORCHRUN])
    rows = [
        ("PSS of launcher / agent", f"{torchrun_mb:.0f} MB", " / ".join(f"{part:.0f} MB" for part in parts), "-"),
        (
            f"PSS of {WORKERS} idle workers with torch, launcher and agent",
            f"{total[TORCHRUN]:.0f} MB",
            f"{total[DDPLAUNCH]:.0f} MB",
            f"{total[DDPLAUNCH] / total[TORCHRUN]:.2f}x",
        ),
        (
            f"CPU of launcher and agent, idle for {IDLE_S:.0f} s",
            f"{cost[TORCHRUN][0]:.2f} % of a core",
            f"{cost[DDPLAUNCH][0]:.2f} % of a core",
            "-",
        ),
        ("wake-ups per second of launcher and agent", f"{cost[TORCHRUN][1]:.1f}", f"{cost[DDPLAUNCH][1]:.1f}", "-"),
    ]
    print_table("a running job", rows)


if __name__ == "__main__":
    main()
