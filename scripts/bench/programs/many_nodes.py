"""``many_nodes.py stay|raise FOLDER``: creates ``ready.<attempt>.<rank>``; then idles, or the last rank raises."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    mode, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(1))
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
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
