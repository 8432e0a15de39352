"""What only a machine with NVIDIA GPUs can show: NCCL, devices, no CUDA context in the forkserver, restarts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from ddplaunch.features.gpus.reader import read_once
from ddplaunch.features.health.rules import at_start, ports_at_start

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent.parent
DIGITS = ROOT / "scripts" / "examples" / "train_digits.py"

ALL_REDUCE = """
    import os, torch, torch.distributed as dist
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    total = torch.ones(1 << 20, device="cuda")
    dist.all_reduce(total)
    assert total[0].item() == dist.get_world_size()
    print("sum", int(total[0].item()))
    dist.destroy_process_group()
"""

DIE_ONCE = """
    import os, signal, torch, torch.distributed as dist
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    torch.cuda.synchronize()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
    print("sum", int(total.item()), "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.destroy_process_group()
"""

DEVICES = """
    import os, torch
    print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count(), os.environ["LOCAL_RANK"])
"""

FORKSERVER = """
    import os, torch
    from pathlib import Path
    torch.zeros(1, device="cuda")
    def opened(pid):
        return sorted({os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir() if os.path.islink(f)})
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(b"ddplaunch\\0forkserver"):
            print("forkserver", [path for path in opened(entry.name) if "nvidia" in path])
"""

SMI = ("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")


def ddplaunch(source: str | Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """Output of a run that must succeed; ``source`` is a script's text or path."""
    with tempfile.TemporaryDirectory() as folder:
        script = source if isinstance(source, Path) else Path(folder) / "script.py"
        if isinstance(source, str):
            script.write_text(textwrap.dedent(source))
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, "-m", "ddplaunch", *arguments, str(script)],
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout + done.stderr


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def all_reduce(method: str) -> None:
    assert f"sum {COUNT}" in ddplaunch(ALL_REDUCE, "--start-method", method)


def digits() -> None:
    text = ddplaunch(DIGITS)
    accuracy = float(re.findall(r"at the end: ([\d.]+)%", text)[0])
    assert "cuda" in text, "it did not run on the GPU"
    assert accuracy > 95, f"accuracy {accuracy}"


def default_workers() -> None:
    assert len(re.findall(r"devices ", ddplaunch(DEVICES))) == COUNT


def named_gpus() -> None:
    last = str(COUNT - 1)
    assert f"devices {last} 1 0" in ddplaunch(DEVICES, "--gpus", last)


def own_gpus() -> None:
    text = ddplaunch(DEVICES, "--gpus-per-proc", "1")
    assert all(re.search(rf"devices {n} 1 {n}", text) for n in range(COUNT)), text


def virtual_local_rank() -> None:
    text = ddplaunch(DEVICES, "--virtual-local-rank", "--nproc-per-node", "gpu")
    assert all(f"devices {n} 1 0" in text for n in range(COUNT)), text


def inherited_mask() -> None:
    assert f"devices {COUNT - 1} 1 0" in ddplaunch(DEVICES, env={"CUDA_VISIBLE_DEVICES": str(COUNT - 1)})


def clean_forkserver() -> None:
    assert "forkserver []" in ddplaunch(FORKSERVER, "--nproc-per-node", "1")


def restart(method: str) -> None:
    text = ddplaunch(DIE_ONCE, "--max-restarts", "1", "--start-method", method)
    assert f"sum {COUNT * COUNT} attempt 1" in text, text


def health() -> None:
    """Prints each value that is read of each GPU, and what the rules say of it."""
    started = time.monotonic()
    read = read_once("health", 30)
    print(f"      read in {time.monotonic() - started:.2f} s")
    for gpu in read.gpus:
        print(*(f"      GPU {gpu.index} {name}: {value}" for name, value in vars(gpu).items()), sep="\n")
    for port in read.ports:
        print(f"      {port}")
    findings = [finding for gpu in read.gpus for finding in at_start(gpu)]
    for finding in (*findings, *ports_at_start(read.ports)):
        print(f"      {finding.severity}: GPU {finding.gpu}: {finding.rule}: {finding.text} ({finding.action})")
    assert not read.missing, read.missing
    assert len(read.gpus) >= COUNT
    assert all(gpu.used_bytes is not None for gpu in read_once("memory", 30).gpus)
    refused = [finding for finding in findings if finding.severity == "refuse"]
    assert not refused, f"{len(refused)} findings would refuse this node"


def gpus_are_free() -> None:
    done = subprocess.run(SMI, capture_output=True, text=True, check=True)
    assert not done.stdout.strip(), f"still on the GPU: {done.stdout.split()}"


CHECKS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("health of the GPUs", health),
    ("NCCL all-reduce, forkserver", lambda: all_reduce("forkserver")),
    ("NCCL all-reduce, spawn", lambda: all_reduce("spawn")),
    ("digits training, one worker per GPU", digits),
    ("one worker per GPU by default", default_workers),
    ("--gpus", named_gpus),
    ("--gpus-per-proc", own_gpus),
    ("--virtual-local-rank", virtual_local_rank),
    ("CUDA_VISIBLE_DEVICES is obeyed", inherited_mask),
    ("no GPU opened by the forkserver", clean_forkserver),
    ("NCCL restart after SIGKILL of a rank, forkserver", lambda: restart("forkserver")),
    ("NCCL restart after SIGKILL of a rank, spawn", lambda: restart("spawn")),
    ("nothing of ours is left on the GPUs", gpus_are_free),
)

COUNT = gpus()


def main() -> int:
    if COUNT == 0:
        print("no NVIDIA GPU that torch can use: nothing was checked")
        return 1
    print(f"{COUNT} GPUs")
    bad = 0
    for name, check in CHECKS:
        try:
            check()
            print(f"ok    {name}", flush=True)
        except Exception as error:
            bad += 1
            print(f"BAD   {name}: {error}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
