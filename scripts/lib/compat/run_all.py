"""Runs libraries and programs in dry runs of two workers, and prints a line for each: its time, and the result.

Arguments are parts of the names of runs; without any, all libraries are run, and no program. ``--ci`` runs one example
of each library, and stops after ``CI_TOTAL_S``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import checkouts
from programs import PROGRAMS

FOLDER = Path(__file__).parent.absolute()
LOGS = Path("build/compat-logs")
LIMIT_S = 600.0
CI_LIMIT_S = 120.0
CI_TOTAL_S = 240.0

NEW_FOLDER = "{new folder}"
ACCELERATE = "accelerate.test_utils.scripts."
LIBRARIES: dict[str, tuple[str, ...]] = {
    "transformers Trainer, DDP": ("hf_trainer.py",),
    "transformers Trainer, DDP, bf16": ("hf_trainer.py", "bf16=True"),
    "transformers Trainer, DDP, fp16": ("hf_trainer.py", "fp16=True"),
    "transformers Trainer, DDP, torch_compile": ("hf_trainer.py", "torch_compile=True"),
    "transformers Trainer, FSDP": ("hf_trainer.py", "fsdp=full_shard"),
    "accelerate, test_script": ("-m", f"{ACCELERATE}test_script"),
    "accelerate, test_ops": ("-m", f"{ACCELERATE}test_ops"),
    "accelerate, test_sync": ("-m", f"{ACCELERATE}test_sync"),
    "accelerate, test_distributed_data_loop": ("-m", f"{ACCELERATE}test_distributed_data_loop"),
    "Lightning, ddp": ("lightning_fit.py", "ddp", "32-true"),
    "Lightning, ddp, fp16": ("lightning_fit.py", "ddp", "16-mixed"),
    "Lightning, fsdp, bf16": ("lightning_fit.py", "fsdp", "bf16-mixed"),
    "accelerate, the guide's loop": ("guides/accelerate_loop.py",),
    "transformers Trainer, restart": ("--max-restarts", "1", "guides/hf_resume.py", NEW_FOLDER),
    "Lightning, restart": ("--max-restarts", "1", "guides/lightning_resume.py", NEW_FOLDER),
    "W&B and TensorBoard, restart": ("--max-restarts", "1", "guides/track.py", NEW_FOLDER),
    **{f"DeepSpeed, ZeRO {stage}": ("deepspeed_zero.py", str(stage)) for stage in range(4)},
}
CI_RUNS = ("transformers Trainer, DDP", "accelerate, test_ops", "Lightning, ddp", "DeepSpeed, ZeRO 2")


class Run(NamedTuple):
    """What follows ``ddplaunch --dry-run --nproc-per-node 2``, with which Python, and where."""

    python: str
    arguments: list[str]
    folder: Path
    environment: dict[str, str]


def run_of(name: str) -> Run:
    """The run with this name; a program's is ready to start."""
    if name in PROGRAMS:
        program = PROGRAMS[name]
        checkouts.prepare(program)
        folder = checkouts.source(program) / program.folder
        return Run(str(checkouts.PYTHON), checkouts.command(program), folder, checkouts.environment(program))
    words = (tempfile.mkdtemp() if word == NEW_FOLDER else word for word in LIBRARIES[name])
    arguments = [str(FOLDER / word) if word.endswith(".py") else word for word in words]
    return Run(sys.executable, arguments, Path.cwd(), {**os.environ, "WANDB_MODE": "offline"})


def outcome(name: str, limit_s: float) -> str:
    """Run it; "ok", or why it failed. Its output is in ``LOGS``."""
    log = LOGS / f"{name.replace(' ', '_')}.log"
    try:
        python, arguments, folder, environment = run_of(name)
    except subprocess.CalledProcessError as error:
        return f"FAILED: {' '.join(error.cmd[:4])} ...: {error.stderr.strip().splitlines()[-1]}"
    command = [python, "-m", "ddplaunch", "--dry-run", "--nproc-per-node", "2", *arguments]
    with log.open("wb") as file:
        running = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        code = running.wait(limit_s)
    except subprocess.TimeoutExpired:
        running.terminate()  # It stops its workers.
        running.wait()
        return f"FAILED: not finished after {limit_s:.0f} s, see {log}"
    return "ok" if code == 0 else f"FAILED: exit code {code}, see {log}"


def chosen(arguments: list[str]) -> list[str]:
    if arguments == ["--ci"]:
        return list(CI_RUNS)
    return [name for name in (*LIBRARIES, *(PROGRAMS if arguments else ())) if all(part in name for part in arguments)]


def main() -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    limit_s = CI_LIMIT_S if "--ci" in sys.argv else LIMIT_S
    end_s = time.monotonic() + (CI_TOTAL_S if "--ci" in sys.argv else float("inf"))
    results = []
    for name in chosen(sys.argv[1:]):
        before_s = time.monotonic()
        left_s = min(limit_s, end_s - before_s)
        results.append(outcome(name, left_s) if left_s > 0 else f"FAILED: not started, {CI_TOTAL_S:.0f} s are over")
        print(f"{name:50} {time.monotonic() - before_s:4.0f} s  {results[-1]}", flush=True)
    return int(not results or set(results) != {"ok"})


if __name__ == "__main__":
    sys.exit(main())
