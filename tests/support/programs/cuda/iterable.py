"""Streams samples, split over ranks and DataLoader workers, through a prefetcher on a side stream."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Numbers(IterableDataset):
    def __init__(self, count, rank, world_size):
        self.count, self.rank, self.world_size = count, rank, world_size

    def __iter__(self):
        info = get_worker_info()
        shard = self.rank * info.num_workers + info.id
        for number in range(shard, self.count, self.world_size * info.num_workers):
            yield torch.tensor([float(number)]), number


class Prefetcher:
    """Copies the next batch to the GPU while the current one is used."""

    def __init__(self, loader, device):
        self.loader, self.device = iter(loader), device
        self.stream = torch.cuda.Stream(device)
        self.preload()

    def preload(self):
        self.batch = next(self.loader, None)
        if self.batch is not None:
            with torch.cuda.stream(self.stream):
                self.batch = [item.cuda(self.device, non_blocking=True) for item in self.batch]

    def __iter__(self):
        while self.batch is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            batch = self.batch
            for item in batch:
                item.record_stream(torch.cuda.current_stream())
            self.preload()
            yield batch


def main():
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    print(f"ready (pid: {os.getpid()})", flush=True)
    model = DDP(nn.Linear(1, 1).to(device), device_ids=[device])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = DataLoader(
        Numbers(64, rank, world_size),
        batch_size=4,
        num_workers=2,
        pin_memory=True,
        persistent_workers=True,
        prefetch_factor=2,
    )
    seen = []
    for values, numbers in Prefetcher(loader, device):
        with torch.cuda.nvtx.range("step"):
            optimizer.zero_grad()
            model(values).mean().backward()
            optimizer.step()
        seen += numbers.tolist()
    everything = [None] * world_size
    dist.all_gather_object(everything, seen)
    if rank == 0:
        numbers = [number for part in everything for number in part]
        print(f"seen {len(set(numbers))} of 64, {len(numbers)} in all", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
