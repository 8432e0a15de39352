"""Time from a worker's death until all 8 ranks of the next attempt have finished an all-reduce.

torchrun's shared TCPStore does not survive the restart of a gloo job, so TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from common import DDPLAUNCH, PROGRAMS, TORCHRUN, alternate, check_hosts, compared, print_table, seconds, size

WORKERS = size("BENCH_WORKERS", 8, 2)


def restart_s(command: tuple[str, ...]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("--nproc-per-node", str(WORKERS), "--max-restarts", "1", str(PROGRAMS / "die_once.py"))
        seconds((*command, *arguments), {"TIMES": folder, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
        ready = [float((Path(folder) / f"1.{rank}").read_text()) for rank in range(WORKERS)]
        return max(ready) - float((Path(folder) / "death").read_text())


def main() -> None:
    check_hosts()
    times = alternate(partial(restart_s, TORCHRUN), partial(restart_s, DDPLAUNCH))
    print_table("restart", [compared(f"a rank dies -> all {WORKERS} ranks ready again", *times)])


if __name__ == "__main__":
    main()
