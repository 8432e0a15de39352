"""A model over two GPUs, in each rank; the ranks' models are kept the same by DDP."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyMpModel(nn.Module):
    def __init__(self, dev0, dev1):
        super().__init__()
        self.dev0 = dev0
        self.dev1 = dev1
        self.net1 = nn.Linear(10, 10).to(dev0)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5).to(dev1)

    def forward(self, x):
        x = self.relu(self.net1(x.to(self.dev0)))
        return self.net2(x.to(self.dev1))


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    print(f"ready (pid: {os.getpid()})", flush=True)
    # The two GPUs of this rank: the only ones it sees, or two of all.
    first = 0 if torch.cuda.device_count() == 2 else 2 * local_rank
    dev0, dev1 = first, first + 1
    model = DDP(ToyMpModel(dev0, dev1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    optimizer.zero_grad()
    outputs = model(torch.randn(20, 10))
    labels = torch.randn(20, 5).to(dev1)
    nn.functional.mse_loss(outputs, labels).backward()
    optimizer.step()
    places = (model.module.net1.weight.get_device(), model.module.net2.weight.get_device())
    print(f"rank {rank}: layers on GPUs {places} of {torch.cuda.device_count()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
