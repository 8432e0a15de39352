"""Dumps its environment as dump_environ.py, and trains a small model over gloo from a fixed seed: ``FOLDER``.

Rank 0 writes the loss of every step to FOLDER/losses.

What DDP and an optimizer would do is done by hand: to import them takes as long as to import torch.
"""

import sys
from pathlib import Path

import dump_environ
import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
dump_environ.dump(folder)
torch.set_num_threads(1)
torch.manual_seed(7)
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(16, 1))
torch.manual_seed(100 + dist.get_rank())
losses = []
for _ in range(8):
    inputs = torch.randn(32, 8)
    loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter -= 0.05 * parameter.grad / dist.get_world_size()
    dist.all_reduce(loss.detach_())
    losses.append(loss.item().hex())
if dist.get_rank() == 0:
    (folder / "losses").write_text("\n".join(losses))
dist.destroy_process_group()
