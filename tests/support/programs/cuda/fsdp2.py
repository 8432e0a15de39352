"""Shards a model with ``fully_shard`` over a 2-dimensional mesh, trains, saves and loads a distributed checkpoint.

``fsdp2.py FOLDER``.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + checkpoint(self.feed, self.norm(x), use_reentrant=False)


def main():
    folder = sys.argv[1]
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}")
    torch.cuda.set_device(device)
    dist.init_process_group(backend="nccl", device_id=device)
    print(f"ready (pid: {os.getpid()})", flush=True)
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(Layer(16), Layer(16), nn.Linear(16, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    losses = []
    for _ in range(8):
        x = torch.ones(4, 16, device=device)
        loss = (model(x).float() - 3).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    before = model[2].weight.full_tensor().clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    same = torch.equal(model[2].weight.full_tensor(), before)
    if dist.get_rank() == 0:
        fell = "fell" if losses[-1] < losses[0] else "rose"
        print(
            f"loss {fell}, checkpoint {'same' if same else 'different'}, {torch.cuda.device_count()} GPUs", flush=True
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
