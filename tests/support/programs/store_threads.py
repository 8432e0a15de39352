"""Rank 0 prints the stores that this run serves: of each, its process's kind, and the thread that torch has started."""

import os
from pathlib import Path

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
own = os.environ["DDPLAUNCH_RUN_ID"].rpartition(".")[0].encode()
for process in Path("/proc").iterdir() if dist.get_rank() == 0 else ():
    try:
        if process.name.isdigit() and own in (process / "environ").read_bytes():
            names = [(task / "comm").read_text().strip() for task in (process / "task").iterdir()]
            for name in names:
                if name.startswith("pt_tcpstore"):
                    print("store", name)
    except OSError:  # It has ended, or is another user's.
        pass
dist.barrier()
