"""A script of ``torch.distributed.launch``'s times: ``--local-rank``, ``env://``, SyncBatchNorm, reduced metrics."""

import argparse
import os
import random

import numpy as np
import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
from torch import nn


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", "--local_rank", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--sync-bn", action="store_true")
    return parser.parse_args()


def reduce_mean(tensor, nprocs):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= nprocs
    return rt


def main():
    args = parse()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.cuda.manual_seed_all(1)
    cudnn.deterministic = True
    cudnn.benchmark = False

    torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend="nccl", init_method="env://")
    print(f"ready (pid: {os.getpid()})", flush=True)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).cuda()
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[args.local_rank], output_device=args.local_rank)
    criterion = nn.CrossEntropyLoss().cuda(args.local_rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)

    for epoch in range(args.epochs):
        images = torch.randn(8, 3, 8, 8).cuda(args.local_rank, non_blocking=True)
        target = torch.randint(0, 3, (8,)).cuda(args.local_rank, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        dist.barrier()
        reduced = reduce_mean(loss.detach(), dist.get_world_size())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.local_rank == 0:
            print(f"epoch {epoch} loss {reduced.item():.4f}", flush=True)
    torch.cuda.empty_cache()
    if args.local_rank == 0:
        print(f"trained on {torch.cuda.get_device_name(args.local_rank)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
