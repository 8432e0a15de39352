"""A loop with accelerate."""

import torch
from accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
batches = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for batch in batches:
    with accelerator.accumulate(model):
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
assert accelerator.device.type == "cuda"
accelerator.end_training()
