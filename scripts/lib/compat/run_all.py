"""Runs each program below in a dry run of two workers, and prints a table of what succeeded."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
LOGS = Path("build/compat-logs")
LIMIT_S = 300.0

ACCELERATE = "accelerate.test_utils.scripts."
RUNS: dict[str, tuple[str, ...]] = {
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
    **{f"DeepSpeed, ZeRO {stage}": ("deepspeed_zero.py", str(stage)) for stage in range(4)},
}


def outcome(name: str, program: tuple[str, ...]) -> str:
    """Run it; "ok", or why it failed. Its output is in ``LOGS``."""
    log = LOGS / f"{name.replace(' ', '_')}.log"
    target = program if program[0] == "-m" else (str(FOLDER / program[0]), *program[1:])
    command = [sys.executable, "-m", "ddplaunch", "--dry-run", "--nproc-per-node", "2", *target]
    with log.open("wb") as file:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    try:
        code = running.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        running.terminate()  # It stops its workers.
        running.wait()
        return f"FAILED: not finished after {LIMIT_S:.0f} s, see {log}"
    return "ok" if code == 0 else f"FAILED: exit code {code}, see {log}"


def main() -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    chosen = {name: program for name, program in RUNS.items() if all(part in name for part in sys.argv[1:])}
    results = []
    for name, program in chosen.items():
        before_s = time.monotonic()
        results.append(outcome(name, program))
        print(f"{name:42} {time.monotonic() - before_s:4.0f} s  {results[-1]}", flush=True)
    return int(not results or set(results) != {"ok"})


if __name__ == "__main__":
    sys.exit(main())
