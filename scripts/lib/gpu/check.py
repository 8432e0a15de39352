"""What only a machine with NVIDIA GPUs can show: NCCL, devices, no CUDA context in the forkserver, restarts, faults.

Also compares what a dry run computes with what the GPU computes. ``--keep DIR`` writes the output of each run there.
"""

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

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ddplaunch.features.gpus.reader import read_once
from ddplaunch.features.hangs import flight_record
from ddplaunch.features.health.rules import at_start, ports_at_start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[3]
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

PROGRAMS = Path(__file__).with_name("programs")

SMI = ("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")


def ddplaunch(
    source: str | Path, *options: str, arguments: Sequence[str] = (), code: int = 0, env: dict[str, str] | None = None
) -> str:
    """Output of a run that must end with ``code``; ``source`` is a script's text or path."""
    with tempfile.TemporaryDirectory() as folder:
        script = source if isinstance(source, Path) else Path(folder) / "script.py"
        if isinstance(source, str):
            script.write_text(textwrap.dedent(source))
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "ddplaunch", *options, str(script), *arguments]
        environ = {**os.environ, "PYTHONPATH": path, "XDG_STATE_HOME": folder, **(env or {})}
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
        text = done.stdout + done.stderr
        keep(" ".join((script.name, *options, *arguments)), text, Path(folder))
        assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{text[-4000:]}"
        return text


def keep(name: str, text: str, folder: Path) -> None:
    """Keep the output of a run, its report and its last stacks, if that is wanted."""
    if KEEP is None:
        return
    KEEP.mkdir(parents=True, exist_ok=True)
    found = [file for pattern in ("report.json", "hang.txt") for file in folder.rglob(pattern)]
    text += "".join(f"\n\n===== {file.name}\n{file.read_text(errors='replace')}" for file in found)
    (KEEP / re.sub(r"[^\w.]+", "-", f"{len(list(KEEP.iterdir())):02} {name}")).with_suffix(".txt").write_text(text)


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


def ras_and_record() -> None:
    text = ddplaunch(PROGRAMS / "ras.py", "--nproc-per-node", "1", "--line-prefix", "")
    ras, record = re.findall(r"^(?:RAS|record): (.*?)(?=^record: |^ddplaunch: )", text, re.MULTILINE | re.DOTALL)
    assert re.search(r'"communicators|Communicators', ras), ras
    parsed = flight_record.parse(record.encode(), {})
    reduced = [call for call in parsed.calls if call.operation == "all_reduce"]
    assert len(reduced) == 4, parsed
    assert all(call.is_done for call in reduced), parsed


def hang_is_reported() -> None:
    options = ("--nproc-per-node", "1", "--hang-report", "5", "--hang-timeout", "15")
    text = ddplaunch(PROGRAMS / "hang.py", *options, arguments=("600", "60"), code=87)
    assert "all_reduce" in text, text


def watchdog() -> None:
    """Torch's watchdog ends a rank whose collective has timed out: its last call is named."""
    text = ddplaunch(PROGRAMS / "hang.py", "--nproc-per-node", "1", arguments=("10", "60"), code=134)
    assert "timed out" in text.lower(), text


def fault(name: str, *expected: str, workers: int = 1) -> None:
    text = ddplaunch(PROGRAMS / "fault.py", "--nproc-per-node", str(workers), arguments=(name,), code=1)
    assert all(each in text for each in expected), text


def share(*arguments: str) -> None:
    """Two ranks use one GPU. After a rank was killed, the memory of all is free before the next attempt."""
    options = ("--nproc-per-node", "2", "--max-restarts", str(len(arguments)))
    text = ddplaunch(PROGRAMS / "share.py", *options, arguments=arguments)
    assert text.count(f"attempt {len(arguments)} is done") == 2, text


def same_as_dry_run(program: str) -> None:
    options = ("--nproc-per-node", "1", "--line-prefix", "", "--quiet")
    on_gpu, dry = (ddplaunch(PROGRAMS / program, *more, *options).splitlines() for more in ((), ("--dry-run",)))
    differing = [f"GPU: {one}\n      dry run: {two}" for one, two in zip(on_gpu, dry, strict=False) if one != two]
    assert len(on_gpu) == len(dry), f"{len(on_gpu)} lines on the GPU, {len(dry)} in the dry run"
    assert not differing, f"{len(differing)} of {len(dry)} lines differ\n      " + "\n      ".join(differing)


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
    ("NCCL's RAS answers, and torch's flight record is read", ras_and_record),
    ("a hang in NCCL is reported and ended", hang_is_reported),
    ("a collective that times out", watchdog),
    ("an index out of bounds", lambda: fault("index", "device-side assert")),
    (
        "an address out of bounds: the driver's Xid is shown",
        lambda: fault("address", "illegal memory access", "Xid 31"),
    ),
    ("the GPU's memory is full", lambda: fault("memory", "The GPU's memory is full")),
    ("more workers than GPUs", lambda: fault("device", "There are more workers than GPUs")),
    ("two ranks of NCCL on one GPU", lambda: fault("same_gpu", "Duplicate GPU", workers=2)),
    ("two workers share a GPU", share),
    ("two workers share a GPU, one is killed", lambda: share("die")),
    ("autocast gives the same types in a dry run", lambda: same_as_dry_run("autocast.py")),
    ("collectives do the same in a dry run", lambda: same_as_dry_run("collectives.py")),
    ("nothing of ours is left on the GPUs", gpus_are_free),
)

COUNT = gpus()
KEEP = Path(sys.argv[2]) if sys.argv[1:2] == ["--keep"] and len(sys.argv) == 3 else None


def main() -> int:
    if len(sys.argv) > 1 and KEEP is None:
        print("usage: scripts/gpu_check [--keep DIR]")
        return 2
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
