"""One optimizer step of a small model with DDP over gloo."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
dist.destroy_process_group()
