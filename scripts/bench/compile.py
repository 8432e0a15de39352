"""The start of a job whose step torch.compile compiles for the CPU: the first run and the second one, beside torchrun.

Each round begins without caches. By default torch keeps what it compiles in the folder for temporary files: ``kept``
where the second run finds that of the first, ``new`` where it does not, as in a container or in a job of a scheduler
that has its own. The time is that of the whole command, which ends when each rank has done a step.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

import common
from common import DDPLAUNCH, IS_SMALLEST, REPEATS, TORCHRUN, size

WORKERS = str(size("BENCH_WORKERS", 2, 1))
VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")

STEP = """
import torch
from torch import nn

layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
torch.compile(nn.Sequential(*layers))(torch.randn(32, 64)).square().mean().backward()
"""
SMALL_STEP = "import torch; torch.compile(lambda x: x @ x)(torch.ones(8, 8))"

LAUNCHERS = {
    "torchrun, /tmp is kept": (TORCHRUN, "kept"),
    "torchrun, /tmp is new": (TORCHRUN, "new"),
    "ddplaunch --compile-cache off, /tmp is kept": ((*DDPLAUNCH, "--compile-cache", "off"), "kept"),
    "ddplaunch, /tmp is kept": (DDPLAUNCH, "kept"),
    "ddplaunch, /tmp is new": (DDPLAUNCH, "new"),
}


def two_runs(launcher: tuple[str, ...], temporary: str) -> tuple[float, float]:
    """The seconds of two runs that begin without caches."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SMALL_STEP if IS_SMALLEST else STEP)
        times = []
        for number in ("first", "second"):
            of_run = folder / (temporary if temporary == "kept" else number)
            of_run.mkdir(exist_ok=True)
            env = {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(of_run)}
            command = (*launcher, "--nproc-per-node", WORKERS, str(folder / "train.py"))
            times.append(common.seconds(command, env))
    return times[0], times[1]


def main() -> None:
    """Measure in turns, and print a table."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    shown = dict(list(LAUNCHERS.items())[-1:]) if IS_SMALLEST else LAUNCHERS
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in shown}
    for _ in range(REPEATS):
        for name, settings in shown.items():
            times[name].append(two_runs(*settings))
    print(f"{WORKERS} workers, {REPEATS} rounds, medians\n\n| launcher | first run | second run |\n|---|---|---|")
    for name, found in times.items():
        first, second = (statistics.median(each) for each in zip(*found, strict=True))
        print(f"| {name} | {first:.1f} s | {second:.1f} s |")


if __name__ == "__main__":
    main()
