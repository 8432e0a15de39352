"""Start, failure and loss of a node in jobs on several nodes over SSH, compared with torchrun; needs root.

The nodes are network namespaces with a real sshd each, from ``tests/support/nodes.py``. ``ssh`` starts one torchrun per
node. Measures that take torchrun a minute run once with torchrun.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from common import DDPLAUNCH, IS_SMALLEST, PROGRAMS, REPEATS, TORCHRUN, print_table, size

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
from tests.support.nodes import Keys, Lab  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOSTS, WORKERS = size("BENCH_NODES", 8, 2), 2
SCRIPT = str(PROGRAMS / "many_nodes.py")
GIVE_UP_S = 60.0
START = f"{HOSTS} hosts x {WORKERS} workers: command to all ranks ready"
LOSS = "3 nodes 2:3, a node loses power or network: training again"
LOSS_OF_ENDPOINT = "3 nodes 2:3, the node with the rendezvous endpoint dies: training again"


class Job:
    """A job on all nodes of a lab, started by torchrun or ddplaunch; its workers report by files in ``folder``."""

    def __init__(self, lab: Lab, folder: Path, nnodes: str, workers: int, mode: str, torchrun: bool) -> None:
        self.folder = folder
        self.lab = lab
        self.began = time.time()
        arguments = ("--nproc-per-node", str(workers), SCRIPT, mode, str(folder))
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
        if torchrun:
            meet = ("--nnodes", nnodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{lab.nodes[0].address}:29400")
            restarts = "0" if mode == "raise" else "3"  # With a restart the workers would be gone between two attempts.
            command = " ".join(("OMP_NUM_THREADS=1", *TORCHRUN, *meet, "--max-restarts", restarts, *arguments))
            ssh = [["ssh", "-F", str(lab.ssh_config), node.name, command] for node in lab.nodes]
            self.processes = [lab.popen(line, **quiet) for line in ssh]
        else:
            hosts = ("--hosts", ",".join(node.name for node in lab.nodes), "--ssh-config", str(lab.ssh_config))
            self.processes = [lab.popen((*DDPLAUNCH, *hosts, "--nnodes", nnodes, *arguments), **quiet)]

    def wait_for(self, condition: Callable[[], bool]) -> float:
        """The ``time.time()`` at which ``condition`` became true; infinite after ``GIVE_UP_S`` seconds."""
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline:
            if condition():
                return time.time()
            time.sleep(0.005)
        return float("inf")

    def all_ready(self, count: int, number: int = 0) -> bool:
        return len(list(self.folder.glob(f"ready.{number}.*"))) >= count

    def workers(self) -> list[int]:
        return [
            pid for node in self.lab.nodes for pid, line in node.pids().items() if SCRIPT in line and "-m" not in line
        ]

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()


@contextmanager
def job(keys: Keys, count: int, nnodes: str, workers: int, mode: str, torchrun: bool) -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder) / "lab", keys, count) as lab:
        (results := Path(folder) / "results").mkdir()
        running = Job(lab, results, nnodes, workers, mode, torchrun)
        try:
            yield running
        finally:
            running.end()


def start_s(keys: Keys, torchrun: bool) -> float:
    """Seconds from the command until all ranks on ``HOSTS`` have finished an all-reduce."""
    with job(keys, HOSTS, str(HOSTS), WORKERS, "stay", torchrun) as running:
        return running.wait_for(lambda: running.all_ready(HOSTS * WORKERS)) - running.began


def failure_s(keys: Keys, torchrun: bool) -> float:
    """Seconds from a rank's exception until no worker is left on any node; the other ranks sleep."""
    with job(keys, 2, "2", 2, "raise", torchrun) as running:
        running.wait_for((running.folder / "raised").exists)
        raised = float((running.folder / "raised").read_text())
        return running.wait_for(lambda: not running.workers()) - raised


def loss_s(keys: Keys, torchrun: bool, victim: int, silently: bool) -> float:
    """Seconds from the crash of a node until the other nodes' ranks have finished an all-reduce."""
    with job(keys, 3, "2:3", 1, "stay", torchrun) as running:
        running.wait_for(lambda: running.all_ready(3))
        time.sleep(1)
        died = time.time()
        running.lab.nodes[victim].crash(silently)
        return running.wait_for(lambda: running.all_ready(2, 1)) - died


def shown(seconds: float) -> str:
    return f"over {GIVE_UP_S:.0f} s" if seconds == float("inf") else f"{seconds:.2f} s"


def row(name: str, measure: Callable[[bool], float], repeats: int = REPEATS, torchrun: int = 1) -> tuple[str, ...]:
    theirs = statistics.median(measure(True) for _ in range(torchrun)) if not IS_SMALLEST else float("inf")
    ours = statistics.median(measure(False) for _ in range(repeats))
    ratio = f"{'over ' if theirs == float('inf') else ''}{min(theirs, GIVE_UP_S) / ours:.0f}x faster"
    return name, shown(theirs), shown(ours), ratio


def main() -> None:
    keys = Keys(Path(tempfile.mkdtemp()))
    for name in ("client", *(f"node{n}" for n in range(1, max(HOSTS, 3) + 1))):
        keys.make(name)
    measures: tuple[Callable[[], tuple[str, ...]], ...] = (
        lambda: row(START, lambda t: start_s(keys, t), torchrun=REPEATS),
        lambda: row("2 nodes, a rank raises: all workers of both gone", lambda t: failure_s(keys, t)),
        lambda: row("3 nodes 2:3, a node dies: training again", lambda t: loss_s(keys, t, 2, False)),
        lambda: row(LOSS, lambda t: loss_s(keys, t, 2, True), repeats=3),
        lambda: row(LOSS_OF_ENDPOINT, lambda t: loss_s(keys, t, 0, False)),
    )
    rows = [measure() for measure in measures[: size("BENCH_MEASURES", len(measures), 1)]]
    print_table("nodes", rows)


if __name__ == "__main__":
    main()
