"""Prints what each collective of NCCL does on a group of one rank, a line for each type: on a GPU, or as a dry run."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

warnings.simplefilter("ignore")

TYPES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 uint16 uint32 uint64 "
TYPES += "float8_e4m3fn float8_e5m2 float8_e4m3fnuz"
REDUCTIONS = "SUM AVG PRODUCT MIN MAX BAND BOR BXOR"


def filled(dtype: str, count: int = 4, value: int = 3) -> torch.Tensor:
    return torch.full((count,), value, device="cuda").to(getattr(torch, dtype))


def reductions(dtype: str) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    def in_place(call: Callable[..., object], *args: object) -> torch.Tensor:
        tensor = filled(dtype)
        call(tensor, *args)
        return tensor

    def into(call: Callable[..., object], source: object, op: object) -> torch.Tensor:
        target = filled(dtype, value=0)
        call(target, source, op)
        return target

    for name in REDUCTIONS.split():
        op = getattr(dist.ReduceOp, name)
        yield f"all_reduce {name}", partial(in_place, dist.all_reduce, op)
        yield f"reduce {name}", partial(in_place, dist.reduce, 0, op)
        yield f"reduce_scatter_tensor {name}", lambda op=op: into(dist.reduce_scatter_tensor, filled(dtype), op)
        yield f"reduce_scatter {name}", lambda op=op: into(dist.reduce_scatter, [filled(dtype)], op)
    yield "all_reduce PREMUL_SUM", lambda: in_place(dist.all_reduce, dist._make_nccl_premul_sum(2.0))
    yield "broadcast", partial(in_place, dist.broadcast, 0)


def moves(dtype: str) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    def into(call: Callable[..., object], in_list: str) -> torch.Tensor:
        target, source = filled(dtype, value=0), filled(dtype)
        call([target] if "out" in in_list else target, [source] if "in" in in_list else source)
        return target

    def gather() -> torch.Tensor:
        target = filled(dtype, value=0)
        dist.gather(filled(dtype), [target], 0)
        return target

    def to_itself() -> torch.Tensor:
        target = filled(dtype, value=0)
        both = dist.P2POp(dist.isend, filled(dtype), 0), dist.P2POp(dist.irecv, target, 0)
        for work in dist.batch_isend_irecv(list(both)):
            work.wait()
        return target

    def coalesced() -> torch.Tensor:
        tensor = filled(dtype)
        with dist._coalescing_manager(async_ops=True) as works:
            dist.all_reduce(tensor)
            dist.all_reduce(filled(dtype, 2))
        works.wait()
        return tensor

    yield "all_gather", partial(into, dist.all_gather, "out")
    yield "all_gather_into_tensor", partial(into, dist.all_gather_into_tensor, "")
    yield "gather", gather
    yield "scatter", partial(into, dist.scatter, "in")
    yield "all_to_all", partial(into, dist.all_to_all, "in and out")
    yield "all_to_all_single", partial(into, dist.all_to_all_single, "")
    yield "batch_isend_irecv", to_itself
    yield "coalesced", coalesced


def single() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that are refused, or whose result is no tensor."""
    ones = partial(torch.ones, device="cuda")
    yield "every second row", lambda: dist.all_reduce(ones(4, 4)[::2, ::2])
    yield "transposed", lambda: dist.all_reduce(ones(4, 3).t())
    yield "channels_last", lambda: dist.all_reduce(ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
    yield "empty", lambda: dist.all_reduce(ones(0))
    yield "all_gather of another size", lambda: dist.all_gather_into_tensor(ones(5), ones(4))
    yield "all_gather of another type", lambda: dist.all_gather_into_tensor(ones(4).half(), ones(4))
    yield "reduce_scatter of another size", lambda: dist.reduce_scatter_tensor(ones(5), ones(4))
    yield "all_to_all_single, wrong sizes", lambda: dist.all_to_all_single(ones(4), ones(4), [3], [4])
    yield "barrier", lambda: dist.barrier(device_ids=[0])
    yield "monitored_barrier", dist.monitored_barrier
    yield "new_group", lambda: dist.all_reduce(ones(4), group=dist.new_group([0]))
    yield "backend", lambda: (dist.get_backend(), dist.get_backend_config())
    yield "work", work


def work() -> object:
    started = dist.all_reduce(torch.ones(4, device="cuda"), async_op=True)
    started.wait()
    torch.cuda.synchronize()
    future = started.get_future()
    return started.is_completed(), started.is_success(), future.done(), [str(each.dtype) for each in future.wait()]


def result(call: Callable[[], object]) -> object:
    try:
        found = call()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    if not isinstance(found, torch.Tensor):
        return found
    return f"{found.dtype} {found.to(torch.complex128 if found.is_complex() else torch.float64).tolist()}"


torch.cuda.set_device(0)
dist.init_process_group("nccl")
for dtype in TYPES.split():
    for name, call in (*reductions(dtype), *moves(dtype)):
        print(f"{name} of {dtype}: {result(call)}", flush=True)
for name, call in single():
    print(f"{name}: {result(call)}", flush=True)
dist.destroy_process_group()
