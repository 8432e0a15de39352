"""Start of a job over SSH on hosts whose name server never answers, compared with other hosts; needs root.

The hosts are network namespaces, from ``tests/support/nodes.py``. All but the first also have an IPv6 address. Prints
the wall time of each kind of start, and how many starts did not meet at the first rendezvous.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import DDPLAUNCH, IS_SMALLEST, REPEATS, size

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
from tests.support.nodes import Keys, Lab  # noqa: E402

HOSTS = size("BENCH_NODES", 3, 2)
WORKERS = size("BENCH_WORKERS", 1, 1)
PROGRAM = (ROOT / "tests" / "support" / "programs" / "rounds.py", ROOT)
"""Ends after one all-reduce, because the path of its argument exists."""


def start(lab: Lab, folder: str) -> tuple[float, str]:
    """Seconds until the job of one step has ended; and what the launcher wrote, empty if all nodes met at once."""
    names = ",".join(node.name for node in lab.nodes)
    options = ("-v", "--hosts", names, "--ssh-config", str(lab.ssh_config), "--nproc-per-node", str(WORKERS))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": folder, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    done = lab.run((*DDPLAUNCH, *options, *PROGRAM), env=env, stdin=subprocess.DEVNULL)
    elapsed_s = time.perf_counter() - began
    met_at_once = done.returncode == 0 and not re.search(r"\blost\b|restart|another run", done.stderr)
    return elapsed_s, "" if met_at_once else f"exit code {done.returncode}\n{done.stderr}"


def measure(lab: Lab, folder: str) -> float:
    """Print the starts that did not go well. Returns the median of all."""
    starts = [start(lab, folder) for _ in range(REPEATS)]
    failed = [text for _, text in starts if text]
    print(*failed, sep="\n", end="\n" if failed else "")
    print(f"{len(failed)} of {REPEATS} starts did not meet at once; {[round(s, 1) for s, _ in starts]}", flush=True)
    return statistics.median(elapsed_s for elapsed_s, _ in starts)


def main() -> None:
    keys = Keys(Path(tempfile.mkdtemp()))
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder) / "lab", keys, HOSTS) as lab:
        normal_s = float("inf") if IS_SMALLEST else measure(lab, folder)
        for number, node in enumerate(lab.nodes):
            node.silence_dns()
            if number:
                node.run(["ip", "address", "add", f"fd00:99::{number}/64", "dev", "eth0", "nodad"])
        silent_s = measure(lab, folder)
    print(f"{HOSTS} hosts, {WORKERS} workers each: {normal_s:.1f} s, with a silent name server {silent_s:.1f} s")


if __name__ == "__main__":
    main()
