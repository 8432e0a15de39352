"""Trains a small model with DeepSpeed. Argument: the stage of ZeRO."""

import sys

import deepspeed
import torch
from torch import nn


def main() -> None:
    deepspeed.init_distributed("nccl")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": int(sys.argv[1])},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    values = torch.ones(4, 8, device=engine.device, dtype=torch.bfloat16)
    losses = []
    for _ in range(4):
        loss = (engine(values).float() - 5).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses


if __name__ == "__main__":
    main()
