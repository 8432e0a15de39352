"""``--checkpoint``: how long a look for the newest checkpoint takes in folders with many large ones, every 15 s.

Files are sparse: they have the sizes and the ends of real ones, by which the search goes. torchrun has no such search.
"""

from __future__ import annotations

import json
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import REPEATS, print_table, size

from ddplaunch.features.checkpoints.agent import PERIOD_S
from ddplaunch.features.checkpoints.search import Search

COUNT = size("BENCH_CHECKPOINTS", 1000, 3)
FILES = size("BENCH_FILES", 64, 2)
LARGE = 4 << 30

_ZIP_END = b"PK\x05\x06" + bytes(18)


def sparse(path: Path, begin: bytes, end: bytes) -> None:
    """A file of 4 GB."""
    with open(path, "wb") as file:
        file.write(begin)
        file.seek(LARGE - len(end))
        file.write(end)


def of_distributed(path: Path) -> None:
    """As torch.distributed.checkpoint writes it."""
    path.mkdir()
    for number in range(FILES):
        sparse(path / f"__{number}_0.distcp", b"PK\x03\x04", _ZIP_END)
    (path / ".metadata").touch()


def of_torch_save(path: Path) -> None:
    """One file."""
    sparse(path.with_suffix(".pt"), b"PK\x03\x04", _ZIP_END)


def of_safetensors(path: Path) -> None:
    """A folder of them without a mark: each file is looked into. With 1000 tensors, as large models have."""
    path.mkdir()
    each = (LARGE - (1 << 20)) // 1000
    tensors = {
        f"layers.{number}.weight": {"dtype": "BF16", "data_offsets": [number * each, (number + 1) * each]}
        for number in range(1000)
    }
    header = json.dumps(tensors).encode()
    for number in range(FILES):
        sparse(path / f"model-{number}.safetensors", struct.pack("<Q", len(header)) + header, b"\0")


def looks(make: Callable[[Path], None]) -> tuple[float, float]:
    """Seconds of CPU of the first look, at the start of a run, and of a later one."""
    with tempfile.TemporaryDirectory() as name:
        for step in range(COUNT):
            make(Path(name, f"step-{step}"))
        first = _seconds(search := Search(name), all_ended=True)
        later = statistics.median(_seconds(search, all_ended=False) for _ in range(REPEATS))
        return first, later


def _seconds(search: Search, *, all_ended: bool) -> float:
    started_s = time.process_time()
    if search.newest(all_ended=all_ended) is None:
        raise SystemExit("the search has found nothing")
    return time.process_time() - started_s


def main() -> None:
    rows = []
    kinds = {
        f"{COUNT} folders of torch.distributed, {FILES} files of 4 GB each": of_distributed,
        f"{COUNT} files of torch.save, 4 GB each": of_torch_save,
        f"{COUNT} folders of {FILES} safetensors of 4 GB, without a mark": of_safetensors,
    }
    for name, make in kinds.items():
        first_s, later_s = looks(make)
        rows.append((name, "-", f"{1000 * first_s:.0f} ms, then {1000 * later_s:.1f} ms", f"{later_s / PERIOD_S:.3%}"))
    print_table("CPU of a look for the newest checkpoint, and share of the time between two looks", rows)


if __name__ == "__main__":
    main()
