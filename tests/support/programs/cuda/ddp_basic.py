"""DDP on whatever accelerator there is: one device per rank, a few steps, the same weights on every rank at the end."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def setup():
    accelerator = torch.accelerator.current_accelerator()
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    backend = dist.get_default_backend_for_device(accelerator)
    dist.init_process_group(backend, device_id=torch.device(accelerator.type, int(os.environ["LOCAL_RANK"])))
    return dist.get_rank(), backend


def demo_basic(rank):
    torch.manual_seed(rank)
    model = ToyModel().to(rank)
    ddp_model = DDP(model, device_ids=[rank])
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        labels = torch.randn(20, 5).to(rank)
        loss_fn(outputs, labels).backward()
        optimizer.step()
    return ddp_model


def main():
    rank, backend = setup()
    print(f"ready (pid: {os.getpid()}) rank {rank} with {backend}", flush=True)
    model = demo_basic(rank)
    total = sum(p.detach().sum() for p in model.parameters())
    totals = [torch.zeros_like(total, device=rank) for _ in range(dist.get_world_size())]
    dist.all_gather(totals, total)
    print(f"rank {rank}: {'same' if len({t.item() for t in totals}) == 1 else 'different'} weights", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
