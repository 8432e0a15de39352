"""64 jobs of 1 s on 8 simulated GPUs: --sweep, a loop over torchrun, torchrun by xargs -P 8, and simple_gpu_scheduler.

``BENCH_SWEEP_LOOP`` jobs of the loop are run, and their time is multiplied: it takes as long for each job. The peer
starts Python without a launcher for each job, as its users do; `pip install simple-gpu-scheduler` installs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from common import DDPLAUNCH, IS_SMALLEST, PROGRAMS, TORCHRUN, alternate, check_hosts, compared, print_table

JOBS = int(os.environ.get("BENCH_JOBS", 2 if IS_SMALLEST else 64))
LOOP = int(os.environ.get("BENCH_SWEEP_LOOP", 1 if IS_SMALLEST else 8))
GPUS = 8
SCRIPT = str(PROGRAMS / "sleep_a_second.py")
SCHEDULER = shutil.which("simple_gpu_scheduler", path=str(Path(sys.executable).parent)) or ""
TORCHRUN_JOB = f"{' '.join(TORCHRUN)} --standalone --nproc-per-node 1 {SCRIPT} --seed"


def shell_s(text: str, lines: str = "") -> float:
    """Seconds of a shell command that reads ``lines``. A failure exits."""
    with tempfile.TemporaryDirectory() as state:
        env = {**os.environ, "XDG_STATE_HOME": state, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(GPUS)))}
        begun = time.perf_counter()
        done = subprocess.run(["bash", "-c", text], input=lines, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{text} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return time.perf_counter() - begun


def loop_s() -> float:
    """Of torchrun, one job after the other."""
    return shell_s(f"set -e; for seed in $(seq {LOOP}); do {TORCHRUN_JOB} $seed; done") * JOBS / LOOP


def main() -> None:
    """Print the table."""
    check_hosts()
    numbers = "".join(f"{number}\n" for number in range(JOBS))
    commands = "".join(f"{sys.executable} {SCRIPT} --seed {number}\n" for number in range(JOBS))
    own = partial(shell_s, f"{' '.join(DDPLAUNCH)} --sweep - --jobs {GPUS} {SCRIPT}", f"--seed 1..{JOBS}\n")
    at_once = partial(shell_s, f"xargs -P {GPUS} -n 1 {TORCHRUN_JOB}", numbers)
    gpus = " ".join(map(str, range(GPUS)))
    peer = partial(shell_s, f"{SCHEDULER} --gpus {gpus}", commands) if SCHEDULER and not IS_SMALLEST else own
    loop, xargs, scheduler, sweep = alternate(loop_s, at_once, peer, own)
    rows = [
        compared(f"{JOBS} jobs of 1 s, {GPUS} GPUs: a loop over torchrun", loop, sweep),
        compared(f"the same: torchrun by xargs -P {GPUS}", xargs, sweep),
    ]
    if peer is not own:
        rows.append(compared("the same: Python by simple_gpu_scheduler (in place of torchrun)", scheduler, sweep))
    print_table("sweep", rows)


if __name__ == "__main__":
    main()
