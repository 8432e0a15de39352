"""``many_nodes.py stay|raise FOLDER``: creates ``ready.<attempt>.<rank>``; then idles, or the last rank raises.

With the stub of torch, in the tests, the ranks do not meet.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.__version__ != "stub":
        dist.init_process_group("gloo")
    meet()
    later = any(folder.glob("ready.0.*")) and world == 2 and mode == "stay"
    (folder / f"ready.{int(later)}.{rank}").touch()
    if mode == "raise" and rank == world - 1:
        time.sleep(1)
        (folder / "raised.part").write_text(str(time.time()))
        (folder / "raised.part").rename(folder / "raised")
        raise RuntimeError("injected")
    while mode == "raise":
        time.sleep(3600)
    while True:
        meet()
        time.sleep(0.05)


def meet() -> None:
    if torch.__version__ != "stub":
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
