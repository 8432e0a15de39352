"""Hangs in a collective of NCCL: the GPU is busy before it. Arguments: its time limit, and how long it hangs, in s."""

import datetime
import sys

import torch
import torch.distributed as dist

limit_s, hang_s = map(int, sys.argv[1:])
torch.cuda.set_device(0)
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=limit_s), device_id=torch.device("cuda", 0))
tensor = torch.ones(1 << 20, device="cuda")
for _ in range(3):
    dist.all_reduce(tensor)
torch.cuda.synchronize()
print("begins to hang", flush=True)
torch.cuda._sleep(hang_s * 1_800_000_000)  # Clock cycles.
dist.all_reduce(tensor)
torch.cuda.synchronize()
print("goes on", flush=True)
dist.destroy_process_group()
