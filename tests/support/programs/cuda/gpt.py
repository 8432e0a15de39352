"""A small GPT: bfloat16 or float16 autocast, loss scaling, gradient accumulation without syncs, a compiled model.

``gpt.py [bfloat16|float16]``.
"""

import math
import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCABULARY, BLOCK, WIDTH, HEADS = 24, 16, 32, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.c_attn(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))

    def configure_optimizers(self, device_type):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=device_type == "cuda")


def main():
    dtype = sys.argv[1] if len(sys.argv) > 1 else "bfloat16"
    accumulation = 4
    dist.init_process_group(backend="nccl")
    rank, local_rank, world_size = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    device = f"cuda:{local_rank}"
    torch.cuda.set_device(device)
    print(f"ready (pid: {os.getpid()})", flush=True)
    assert accumulation % world_size == 0
    accumulation //= world_size
    torch.manual_seed(1337 + rank)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    device_type = "cuda" if "cuda" in device else "cpu"
    ptdtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)
    if ptdtype is torch.bfloat16:
        assert torch.cuda.is_bf16_supported()

    data = torch.arange(1000) * 7 % VOCABULARY

    def get_batch():
        ix = torch.randint(len(data) - BLOCK - 1, (8,))
        x = torch.stack([data[i : i + BLOCK] for i in ix])
        y = torch.stack([data[i + 1 : i + 1 + BLOCK] for i in ix])
        return (t.pin_memory().to(device, non_blocking=True) for t in (x, y))

    model = GPT().to(device)
    scaler = torch.cuda.amp.GradScaler(enabled=dtype == "float16")
    optimizer = model.configure_optimizers(device_type)
    model = torch.compile(model)
    model = DDP(model, device_ids=[local_rank])
    raw_model = model.module

    losses = []
    x, y = get_batch()
    started = time.time()
    for step in range(30):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 5)
        for micro_step in range(accumulation):
            model.require_backward_grad_sync = micro_step == accumulation - 1
            with nullcontext() if micro_step == accumulation - 1 else model.no_sync(), ctx:
                logits, loss = model(x, y)
                loss = loss / accumulation
            assert logits.dtype == ptdtype
            x, y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach() * accumulation
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append(total.item())
    torch.cuda.synchronize()
    assert all(math.isfinite(loss) for loss in losses)
    keys = {key.split(".")[0] for key in raw_model.state_dict()}
    if rank == 0:
        print(f"loss {losses[0]:.2f} to {losses[-1]:.2f} in {time.time() - started:.1f} s, keys of {keys}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
