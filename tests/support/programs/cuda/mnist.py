"""An MNIST-like training on made-up digits: DistributedSampler, pinned batches, asynchronous copies, best weights."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.dropout1 = nn.Dropout(0.1)
        self.fc1 = nn.Linear(8 * 36, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = self.dropout1(torch.flatten(x, 1))
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def digits(count, seed):
    """Each class is one pattern with noise on it."""
    patterns = torch.randn(10, 1, 14, 14, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return TensorDataset(patterns[labels] + torch.randn(count, 1, 14, 14, generator=generator), labels)


def train(model, device, loader, optimizer):
    model.train()
    for data, target in loader:
        data, target = data.cuda(device, non_blocking=True), target.cuda(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        F.nll_loss(model(data), target).backward()
        optimizer.step()


@torch.no_grad()
def test(model, device, loader):
    model.eval()
    counts = torch.zeros(2, device=device)
    for data, target in loader:
        data, target = data.to(device, non_blocking=True), target.to(device, non_blocking=True)
        counts[0] += (model(data).argmax(dim=1) == target).sum()
        counts[1] += len(target)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    if not torch.cuda.is_available():
        raise SystemExit("this training needs GPUs")
    dist.init_process_group(backend="nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    print(f"ready (pid: {os.getpid()})", flush=True)
    torch.manual_seed(0)
    train_set, test_set = digits(640, 1), digits(256, 2)
    sampler = DistributedSampler(train_set, shuffle=True)
    loader = DataLoader(train_set, 32, sampler=sampler, num_workers=1, pin_memory=True, drop_last=True)
    test_loader = DataLoader(test_set, 64, sampler=DistributedSampler(test_set, shuffle=False), pin_memory=True)

    model = DistributedDataParallel(Net().to(device), device_ids=[local_rank], output_device=local_rank)
    assert next(model.parameters()).is_cuda
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    best, best_weights = 0.0, None
    for epoch in range(3):
        sampler.set_epoch(epoch)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        train(model, device, loader, optimizer)
        end.record()
        torch.cuda.synchronize()
        accuracy = test(model, device, test_loader)
        if accuracy > best:
            best, best_weights = accuracy, {k: v.cpu() for k, v in model.module.state_dict().items()}
        scheduler.step()
        if dist.get_rank() == 0:
            used = torch.cuda.max_memory_allocated() / torch.cuda.max_memory_reserved()
            print(f"epoch {epoch}: {accuracy:.1%} in {start.elapsed_time(end):.0f} ms, {used:.0%} used", flush=True)
    model.module.load_state_dict(best_weights)
    if dist.get_rank() == 0:
        print(f"accuracy {best:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
