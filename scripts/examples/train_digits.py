"""Trains a small convolutional network on handwritten digits with DistributedDataParallel.

An ordinary script for torchrun and everything that replaces it:

    torchrun --nproc-per-node 4 train_digits.py --epochs 15 --checkpoint digits.pt

With --checkpoint it saves after every epoch and goes on from there when it is started again, by hand or by the
launcher's --max-restarts. --fail-at-epoch shows that: one rank fails there, once.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DATA = Path(__file__).with_name("digits.csv.gz")
HELD_OUT = 360  # of 1,797 images


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="file to save to after every epoch and to resume from")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU even where there are GPUs")
    parser.add_argument("--fail-at-epoch", type=int, help="let one rank fail at the start of this epoch, once")
    parser.add_argument("--fail-rank", type=int, default=1, help="the rank that fails")
    return parser.parse_args()


def init_distributed(cpu: bool) -> torch.device:
    """Joins the process group; returns the device of this rank."""
    if cpu or not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns the training and the held-out images; the same split on every rank and in every run."""
    with gzip.open(DATA, "rt", newline="") as file:
        rows = torch.tensor([[int(value) for value in row] for row in csv.reader(file)])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8) / 16, rows[:, -1]
    return (
        TensorDataset(images[HELD_OUT:], labels[HELD_OUT:]),
        TensorDataset(images[:HELD_OUT], labels[:HELD_OUT]),
    )


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * 4 * 4, 10),
    )


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Replaces the file in one step, so that whoever is killed in between leaves the previous one."""
    unfinished = path.with_name(f"{path.name}.tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, unfinished)
    os.replace(unfinished, path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Returns the number of epochs that the checkpoint has behind it."""
    checkpoint = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return int(checkpoint["epoch"])


def train_epoch(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batches: DataLoader, device: torch.device
) -> float:
    """Returns the mean loss of all batches on all ranks."""
    model.train()
    total = torch.zeros((), device=device)
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return float(total) / (len(batches) * dist.get_world_size())


@torch.no_grad()
def accuracy(model: DistributedDataParallel, held_out: TensorDataset, device: torch.device) -> float:
    """Returns the share of held-out images that are told right; every rank looks at its own part of them."""
    model.eval()
    images, labels = held_out[dist.get_rank() :: dist.get_world_size()]
    # The module inside: DDP's own forward talks to the other ranks, which only training needs.
    correct = (model.module(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
    dist.all_reduce(correct)
    return int(correct) / len(held_out)


def fail_once(rank: int) -> None:
    if dist.get_rank() == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        raise RuntimeError(f"rank {rank} fails because of --fail-at-epoch")


def log(message: str) -> None:
    if dist.get_rank() == 0:
        print(message, flush=True)


def train(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(args.seed)
    train_set, held_out = load_digits()
    sampler = DistributedSampler(train_set, seed=args.seed)
    batches = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    model = DistributedDataParallel(build_model().to(device), device_ids=None if device.type == "cpu" else [device])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    log(f"{dist.get_world_size()} ranks on {device.type}, {len(train_set)} images, {len(held_out)} held out")

    done = 0
    if args.checkpoint is not None and args.checkpoint.exists():
        done = load_checkpoint(args.checkpoint, model.module, optimizer, device)
        log(f"resumed from {args.checkpoint} after epoch {done}")

    for epoch in range(done + 1, args.epochs + 1):
        if epoch == args.fail_at_epoch:
            fail_once(args.fail_rank)
        sampler.set_epoch(epoch)
        # Another dropout on each rank, and the same one in a resumed run as in an uninterrupted one.
        torch.manual_seed(args.seed + epoch * dist.get_world_size() + dist.get_rank())
        loss = train_epoch(model, optimizer, batches, device)
        share = accuracy(model, held_out, device)
        log(f"epoch {epoch:2d}/{args.epochs}  loss {loss:.4f}  held-out accuracy {share:.2%}")
        if args.checkpoint is not None:
            if dist.get_rank() == 0:
                save_checkpoint(args.checkpoint, model.module, optimizer, epoch)
            dist.barrier()  # no rank starts the next epoch before this one is saved
    log(f"held-out accuracy at the end: {accuracy(model, held_out, device):.2%}")


def main() -> None:
    args = parse_args()
    device = init_distributed(args.cpu)
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
