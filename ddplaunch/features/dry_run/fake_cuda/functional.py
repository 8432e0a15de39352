"""Functional collectives, for example those of DTensor, through the patched ``ProcessGroup``.

Runs in a worker of a dry run. Torch's own kernels call gloo from C++, and would not follow NCCL's rules. These return
when the operation has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

_library: list[torch.library.Library] = []
"""Kernels are registered as long as their library exists."""


def install() -> None:
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    kernels: dict[str, Callable[..., Any]] = {
        each.__name__: each
        for each in (all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single, broadcast)
    }
    kernels |= {f"{name}_coalesced": _for_each(kernels[name]) for name in tuple(kernels)[:3]}
    kernels |= {f"{name}_": _in_place(kernels[name]) for name in ("all_reduce", "all_reduce_coalesced", "broadcast")}
    kernels |= {f"{name}_out": _into(kernels[name]) for name in ("all_gather_into_tensor", "reduce_scatter_tensor")}
    for name, kernel in kernels.items():
        if hasattr(torch.ops._c10d_functional, name):
            library.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    _library.append(library)


def _for_each(kernel: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    return lambda inputs, *others: [kernel(each, *others) for each in inputs]


def _in_place(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def change(target: Any, *others: Any) -> Any:
        found = kernel(target, *others)
        for old, new in zip(target, found, strict=True) if isinstance(target, list) else [(target, found)]:
            old.copy_(new)
        return target

    return change


def _into(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda input, *others, out: out.copy_(kernel(input, *others).view_as(out))


def all_reduce(input: torch.Tensor, reduce_op: str, group_name: Any) -> torch.Tensor:
    output, options = input.clone(memory_format=torch.contiguous_format), dist.AllreduceOptions()
    options.reduceOp = _operation(reduce_op)
    _group(group_name).allreduce([output], options).wait()
    return output


def all_gather_into_tensor(input: torch.Tensor, group_size: int, group_name: Any) -> torch.Tensor:
    rows, *others = input.shape or (1,)
    output = input.new_empty((rows * group_size, *others))
    _group(group_name)._allgather_base(output, input.contiguous()).wait()
    return output


def reduce_scatter_tensor(input: torch.Tensor, reduce_op: str, group_size: int, group_name: Any) -> torch.Tensor:
    options = dist.ReduceScatterOptions()
    options.reduceOp = _operation(reduce_op)
    output = input.new_empty((input.shape[0] // group_size, *input.shape[1:]))
    _group(group_name)._reduce_scatter_base(output, input.contiguous(), options).wait()
    return output


def all_to_all_single(
    input: torch.Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group_name: Any
) -> torch.Tensor:
    output = input.new_empty((sum(output_split_sizes), *input.shape[1:]))
    sizes = (list(output_split_sizes), list(input_split_sizes))
    _group(group_name).alltoall_base(output, input.contiguous(), *sizes).wait()
    return output


def broadcast(input: torch.Tensor, src: int, group_name: Any) -> torch.Tensor:
    output = input.clone(memory_format=torch.contiguous_format)
    _group(group_name).broadcast(output, src).wait()
    return output


def _group(name: Any) -> Any:
    return name if isinstance(name, dist.ProcessGroup) else _resolve_process_group(name)


def _operation(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())
