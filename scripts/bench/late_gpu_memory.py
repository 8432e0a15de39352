"""How often an attempt starts before the GPU memory of the one before is free, if the driver frees it late.

``late_gpu_memory.py [RESTARTS]``. The driver is the fake one of the tests: it frees the memory of a dead worker after
0.2 to 2 s. Needs gcc.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import PROGRAMS, size

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support import fake_nvml

RESTARTS = int(sys.argv[1]) if len(sys.argv) > 1 else size("BENCH_ROUNDS", 50, 1)
LATE_S = (0.2, 2.0)
POLL_S = 0.01


def found_free(health: str) -> list[bool]:
    """For each attempt after a failure, whether memory was free when its worker started."""
    with tempfile.TemporaryDirectory() as name:
        folder, state = Path(name), Path(name, "state")
        library = fake_nvml.build(folder / "driver")
        free = [line for line in fake_nvml.healthy(0) if not line.startswith("0 used")]
        fake_nvml.say(state, "gpus 1", "driver 570.1", *free, "0 used 0")
        program = [str(PROGRAMS / "hold_gpu_memory.py"), str(state)]
        options = [
            "--nproc-per-node",
            "1",
            "--max-restarts",
            str(RESTARTS),
            "--health",
            health,
            "--log-dir",
            "/dev/null",
        ]
        environ = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(state)}
        job = subprocess.Popen(
            [sys.executable, "-m", "ddplaunch", *options, *program], env=environ, stderr=subprocess.DEVNULL
        )
        while job.poll() is None:
            if "0 used 0\n" not in state.read_text():
                time.sleep(random.uniform(*LATE_S))
                fake_nvml.say(state, "gpus 1", "driver 570.1", *free, "0 used 0")
            time.sleep(POLL_S)
        return [line == "1" for line in state.with_suffix(".found").read_text().split()][1:]


def main() -> None:
    print("| --health | restarts | started before memory was free |\n|---|---|---|")
    for health in ("refuse", "off"):
        free = found_free(health)
        print(f"| {health} | {len(free)} | {free.count(False)} |", flush=True)


if __name__ == "__main__":
    main()
