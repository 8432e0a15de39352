"""Rank 0 saves its model, every rank loads it onto its own GPU: ``ddp_checkpoint.py FILE``."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    path = sys.argv[1]
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    print(f"ready (pid: {os.getpid()})", flush=True)
    torch.manual_seed(rank)
    model = DDP(nn.Linear(10, 5).to(rank), device_ids=[rank])
    if rank == 0:
        with torch.no_grad():
            model.module.weight.fill_(0.25)
        torch.save({"model": model.state_dict(), "rng": torch.cuda.get_rng_state()}, path)

    dist.barrier(device_ids=[rank])
    map_location = {"cuda:0": f"cuda:{rank}"}
    checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    torch.cuda.set_rng_state(checkpoint["rng"])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model(torch.ones(20, 10).to(rank)).sum().backward()
    loaded = model.module.weight.mean().item()
    optimizer.step()

    dist.barrier()
    print(f"rank {rank} loaded weights of {loaded}", flush=True)
    if rank == 0:
        os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
