"""CPU time, memory and threads of the launcher in a run over SSH on many hosts; needs root.

The hosts are network namespaces with a real sshd each, from ``tests/support/nodes.py``; each runs a no-op
program. All hosts share this machine: agents and sshd cause most of the wall time until all agents are ready.
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


def ready(launcher: subprocess.Popen[bytes]) -> None:
    """Wait until all agents are ready."""
    assert launcher.stderr
    output = []
    for line in launcher.stderr:
        output.append(line.decode(errors="replace"))
        if f"{HOSTS} workers on {HOSTS} nodes" in output[-1]:
            return
    sys.exit(f"the job did not start:\n{''.join(output)}")


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
        names = ",".join(node.name for node in lab.nodes)
        command = (*DDPLAUNCH, "--hosts", names, "--ssh-config", str(lab.ssh_config), "--nproc-per-node", "1")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": folder}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        began = time.perf_counter()
        with lab.popen((*command, "--no-python", "sleep", "1000"), env=env, **streams) as running:
            launcher = psutil.Process(running.pid)
            with most_threads(launcher) as most:
                ready(running)
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
    print(f"| command to all agents ready | {wall_s:.1f} s |")
    print(f"| CPU of all hosts until all agents are ready, on shared cores | {hosts_s:.1f} s |")
    own_ms, children_ms = 1000 * own_s / HOSTS, 1000 * children_s / HOSTS
    print(f"| CPU per host: launcher / `ssh -G` | {own_ms:.1f} / {children_ms:.1f} ms |")
    print(f"| launcher's PSS / RSS | {pss_mb:.0f} / {rss_mb:.0f} MB |")
    print(f"| launcher's threads: most / when all agents are ready | {most:.0f} / {threads:.0f} |")


if __name__ == "__main__":
    main()
