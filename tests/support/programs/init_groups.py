"""Opens a process group by the address of the store, prints what torch says of the job, and makes a call by its RPC.

By its environment, every other program does. A second group at the same store would find addresses of the first.
"""

import operator
import os

import torch
import torch.distributed as dist
from torch.distributed import rpc

method = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size)
value = torch.ones(1) * (rank + 1)
dist.all_reduce(value)
print(f"sum {int(value)} of rank {dist.get_rank()}/{dist.get_world_size()}", flush=True)
print(f"elastic {dist.is_torchelastic_launched()} local rank {dist.get_node_local_rank()}", flush=True)
dist.destroy_process_group()
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
print("product", rpc.rpc_sync(f"worker{1 - rank}", operator.mul, (6, 7)), flush=True)
rpc.shutdown()
