"""Fails on a GPU as scripts do. Argument: how."""

import sys

import torch
import torch.distributed as dist


def index() -> None:
    torch.ones(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
    torch.cuda.synchronize()


def address() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def write(pointer, offset):  # noqa: ANN001, ANN202
        tl.store(pointer + offset, 1.0)

    write[(1,)](torch.ones(4, device="cuda"), 1 << 44)
    torch.cuda.synchronize()


def memory() -> None:
    kept = []
    while True:
        kept.append(torch.empty(8 << 30, dtype=torch.uint8, device="cuda"))


def device() -> None:
    torch.cuda.set_device(torch.cuda.device_count())


def same_gpu() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(4, device="cuda"))
    torch.cuda.synchronize()


globals()[sys.argv[1]]()
