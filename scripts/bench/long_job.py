"""What all of ddplaunch's processes but the workers cost a long quiet job: CPU time, beside that of torchrun.

Three jobs run at the same time, so that other load on the machine affects all: torchrun; ddplaunch with what it has for
long jobs switched off; and with all of it on. Workers have imported torch and sleep. A job's time can grow by no more
than this CPU time; if a core is free for it, by nothing.
"""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
import time
from pathlib import Path

import psutil
from common import DDPLAUNCH, TORCHRUN, check_hosts, size
from idle import WORKERS, job

LONG_S = size("BENCH_LONG_S", 600.0, 0.5)
CHECKPOINTS, FILES = 100, 64

OFF = ("--compile-cache", "off", "--numa-binding", "off")


def on(folder: Path) -> tuple[str, ...]:
    """Options of a long job whose checkpoints are in ``folder``."""
    of_end = ("--stop-before-end", "5m", "--time-limit", "24h")
    cpus = ("--compile-cache", "local", "--numa-binding", "auto")
    return ("--checkpoint", str(folder), *of_end, *cpus, "--nccl-report", "--check-first", "quick")


def make_checkpoints(folder: Path) -> None:
    """As torch.distributed.checkpoint leaves them on a disk: empty files of 4 GB, and the mark."""
    for step in range(CHECKPOINTS):
        (one := folder / f"step-{step}").mkdir()
        for number in range(FILES):
            with open(one / f"__{number}_0.distcp", "wb") as file:
                file.truncate(4 << 30)
        (one / ".metadata").touch()


def cpu_s(launcher: psutil.Process, workers: set[int]) -> float:
    """Of the launcher and all descendants that are no workers. A process has the time of those that it has reaped."""
    total = 0.0
    for process in [launcher, *launcher.children(recursive=True)]:
        if process.pid not in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total


def workers_of(launcher: psutil.Process) -> set[int]:
    """The processes that have the variable RANK."""
    found = set[int]()
    for process in launcher.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RANK" in process.environ():
                found.add(process.pid)
    return found


def main() -> None:
    check_hosts()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        make_checkpoints(Path(name))
        commands = {"torchrun": TORCHRUN, "off": (*DDPLAUNCH, *OFF), "on": (*DDPLAUNCH, *on(Path(name)))}
        jobs = {each: stack.enter_context(job(command)) for each, command in commands.items()}
        workers = {each: workers_of(launcher) for each, launcher in jobs.items()}
        time.sleep(min(20.0, LONG_S))  # What follows the start, as a look at the checkpoints, is over.
        started_s = time.monotonic()
        before = {each: cpu_s(launcher, workers[each]) for each, launcher in jobs.items()}
        time.sleep(LONG_S)
        passed_s = time.monotonic() - started_s
        used = {each: cpu_s(launcher, workers[each]) - before[each] for each, launcher in jobs.items()}
    print(f"{WORKERS} workers, {passed_s:.0f} s: {os.cpu_count()} cores, {platform.machine()}, {time.strftime('%F')}\n")
    print("| quiet job | CPU for an hour | share of one core |\n|---|---|---|")
    names = {"torchrun": "torchrun", "off": "ddplaunch, features off", "on": "ddplaunch, all features on"}
    for each, title in names.items():
        share = used[each] / passed_s
        print(f"| {title} | {3600 * share:.1f} s | {100 * share:.2f} % |")


if __name__ == "__main__":
    main()
