"""CPU time, memory and threads of the launcher in a run over SSH on many hosts; needs root.

The hosts are network namespaces with a real sshd each, from ``tests/support/nodes.py``; each runs a shell that prints
a line. All hosts share this machine: their processes, which load Python and torch, cause nearly all of the wall time.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from common import DDPLAUNCH, REPEATS, size

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
from tests.support.nodes import Keys, Lab  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTS = size("BENCH_NODES", 64, 2)


def wait_for_workers(launcher: subprocess.Popen[bytes], errors: Path) -> None:
    """Wait until the worker of each host has printed its line."""
    assert launcher.stdout
    lines = sum(b"up" in line for _, line in zip(range(HOSTS), launcher.stdout, strict=False))
    if lines < HOSTS:
        sys.exit(f"the job did not start:\n{errors.read_text()}")


def cpu_s(launcher: psutil.Process) -> tuple[float, float]:
    """CPU seconds of the launcher, and of its children, one `ssh -G` per host."""
    times = launcher.cpu_times()
    return times.user + times.system, times.children_user + times.children_system


def hosts_cpu_s(launcher: psutil.Process) -> float:
    """CPU seconds of all processes of the hosts, including processes that have exited."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4]) if process != launcher else 0.0
    return total


@contextlib.contextmanager
def most_threads(launcher: psutil.Process) -> Iterator[list[int]]:
    """The most threads that the launcher has meanwhile, looked at every 10 ms."""
    most, is_over = [0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.01):
            most[0] = max(most[0], launcher.num_threads())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield most
    finally:
        is_over.set()
        watcher.join()


def measure(keys: Keys) -> tuple[float, ...]:
    """Wall time; CPU seconds of the launcher, of its children and of the hosts; the launcher's PSS and RSS in MB."""
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder) / "lab", keys, HOSTS) as lab:
        names, errors = ",".join(node.name for node in lab.nodes), Path(folder) / "stderr"
        command = (*DDPLAUNCH, "--hosts", names, "--ssh-config", str(lab.ssh_config), "--nproc-per-node", "1")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": folder}
        program = ("--no-python", "sh", "-c", "echo up; exec sleep 1000")
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        began = time.perf_counter()
        with open(errors, "wb") as log, lab.popen((*command, *program), env=env, stderr=log, **streams) as running:
            launcher = psutil.Process(running.pid)
            with most_threads(launcher) as most:
                wait_for_workers(running, errors)
            wall_s = time.perf_counter() - began
            used_s = *cpu_s(launcher), hosts_cpu_s(launcher)
            memory, threads = launcher.memory_full_info(), launcher.num_threads()
            running.terminate()
            running.wait()
    return wall_s, *used_s, memory.pss / 2**20, memory.rss / 2**20, most[0], threads


def main() -> None:
    keys = Keys(Path(tempfile.mkdtemp()))
    for name in ("client", *(f"node{n}" for n in range(1, HOSTS + 1))):
        keys.make(name)
    measured = [measure(keys) for _ in range(REPEATS)]
    medians = map(statistics.median, zip(*measured, strict=True))
    wall_s, own_s, children_s, hosts_s, pss_mb, rss_mb, most, threads = medians
    print(f"{HOSTS} hosts: {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, medians of {REPEATS}\n")
    print("| measure | ddplaunch |\n|---|---|")
    print(f"| command to the first line of all workers | {wall_s:.1f} s |")
    print(f"| CPU of all hosts until then, on shared cores | {hosts_s:.1f} s |")
    own_ms, children_ms = 1000 * own_s / HOSTS, 1000 * children_s / HOSTS
    print(f"| CPU per host: launcher / `ssh -G` | {own_ms:.1f} / {children_ms:.1f} ms |")
    print(f"| launcher's PSS / RSS | {pss_mb:.0f} / {rss_mb:.0f} MB |")
    print(f"| launcher's threads: most / when all workers run | {most:.0f} / {threads:.0f} |")


if __name__ == "__main__":
    main()
