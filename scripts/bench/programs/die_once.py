"""Every rank writes the time of its all-reduce to the folder TIMES; in the first attempt rank 1 then kills itself."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
(Path(os.environ["TIMES"]) / f"{attempt}.{rank}").write_text(str(time.time()))
if attempt == "0":
    dist.barrier()
    if rank == "1":
        (Path(os.environ["TIMES"]) / "death").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
dist.destroy_process_group()
