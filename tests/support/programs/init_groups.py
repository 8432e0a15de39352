"""Opens a process group by the init method in its argument, ``env`` or ``tcp``; prints what torch says of the job."""

import os
import sys

import torch
import torch.distributed as dist

METHODS = {"env": "env://", "tcp": f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"}

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=METHODS[sys.argv[1]], rank=rank, world_size=world_size)
value = torch.ones(1) * (rank + 1)
dist.all_reduce(value)
print(f"sum {int(value)} of rank {dist.get_rank()}/{dist.get_world_size()}", flush=True)
print(f"elastic {dist.is_torchelastic_launched()} local rank {dist.get_node_local_rank()}", flush=True)
dist.destroy_process_group()
