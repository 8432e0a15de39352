"""All ranks train on GPU 0 by gloo. With the argument `die`, rank 1 is killed in the first attempt."""

import os
import signal
import sys

import torch
import torch.distributed as dist

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.cuda.set_device(0)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
memory = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
for _ in range(20):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    if sys.argv[1:] == ["die"] and attempt == 0 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
print(f"attempt {attempt} is done, {torch.cuda.mem_get_info()[0] >> 20} MB are free")
dist.destroy_process_group()
