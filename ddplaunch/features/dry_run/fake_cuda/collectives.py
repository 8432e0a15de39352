"""Collectives by NCCL's rules on process groups of gloo: shapes, types and reduce operations that gloo refuses.

Runs in a worker of a dry run. Patches the methods of ``ProcessGroup``, which all of torch.distributed's Python code
calls, and the kernels of functional collectives. A group that the script made for gloo keeps gloo's rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from ddplaunch.features.dry_run.fake_cuda.patching import wrap
from ddplaunch.features.dry_run.fake_cuda.works import FromItself, JointWork, keep

_GLOO_TYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_GLOO_TYPES |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
_FLOAT8_TYPES = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}

_CHANNELS_LAST = {4: [torch.channels_last], 5: [torch.channels_last_3d]}

_coalesced: dict[Any, list[Any]] = {}
"""Process group -> works that were started since ``_start_coalescing``."""

_to_itself: dict[Any, tuple[list[list[torch.Tensor]], list[FromItself]]] = {}
"""Process group -> what this rank has sent to itself, and what it is to receive, in order. NCCL has no tags."""


def install(is_nccl: Callable[[Any], bool]) -> None:
    """Patch ``ProcessGroup``. ``is_nccl`` tells whether the script made the group for NCCL."""
    for method, names in _METHODS.items():
        for name in names:
            wrap(f"torch.distributed.ProcessGroup.{name}", _for_nccl_groups(is_nccl, method))
    _install_functional()


def _for_nccl_groups(is_nccl: Callable[[Any], bool], method: Callable[..., Any]) -> Callable[..., Any]:
    def around(original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_nccl(group):
            return original(group, *args, **kwargs)
        for tensor in _tensors(args):
            _check_type(tensor)
        work = method(original, group, *args, **kwargs)
        if work is None:
            return None
        if not isinstance(work, JointWork):
            work = JointWork([work], _tensors(args[:1]))
        keep(work, None if method in (_message, _send, _receive) else group)
        if group in _coalesced:
            _coalesced[group].append(work)
        return work

    return around


# Operations that move elements.


def _move(original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation that does not compute: types that gloo does not know travel as bytes."""
    _check_contiguous(args)
    return original(group, *map(_movable, args), **kwargs)


def _message(original: Callable[..., Any], group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """One tensor from one rank to another."""
    return original(group, [_flat(tensor) for tensor in tensors], *args, **kwargs)


def _send(original: Callable[..., Any], group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
    if peer != group.rank():
        return _message(original, group, tensors, peer, *args, **kwargs)
    return _pass_to_itself(group, tensors, sent=[[_flat(tensor).clone() for tensor in tensors]])


def _receive(original: Callable[..., Any], group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
    if peer != group.rank():
        return _message(original, group, tensors, peer, *args, **kwargs)
    return _pass_to_itself(group, tensors, wanted=[FromItself([_flat(tensor) for tensor in tensors])])


def _pass_to_itself(group: Any, tensors: Any, sent: Any = (), wanted: Any = ()) -> JointWork:
    """In NCCL a rank may send itself messages in a batch, sends and receipts in any order; gloo refuses them."""
    all_sent, all_wanted = _to_itself.setdefault(group, ([], []))
    all_sent += sent
    all_wanted += wanted
    while all_sent and all_wanted:
        all_wanted.pop(0).take(all_sent.pop(0))
    return JointWork(wanted, tensors)


def _all_gather(original: Callable[..., Any], group: Any, outputs: Any, inputs: Any, *opts: Any) -> Any:
    [parts], [mine] = outputs, inputs
    if len({part.numel() for part in parts}) == 1:
        return original(group, [[_flat(part) for part in parts]], [_flat(mine)], *opts)
    # As in NCCL, each rank broadcasts its part.
    _flat(parts[group.rank()]).copy_(_flat(mine))
    return JointWork([group.broadcast(part, rank) for rank, part in enumerate(parts)], parts)


def _all_gather_single(original: Callable[..., Any], group: Any, output: Any, input: Any, *opts: Any) -> Any:
    _check_contiguous((output, input))
    _check_sizes(output, input, "output tensor size must be equal to world_size times input tensor size", group)
    return original(group, _flat(output), _flat(input), *opts)


def _all_to_all(original: Callable[..., Any], group: Any, outputs: Any, inputs: Any, *_opts: Any) -> Any:
    """Lists of tensors of any sizes: as one tensor with split sizes."""
    targets, parts = [[_flat(each) for each in tensors] for tensors in (outputs, inputs)]
    target_sizes, part_sizes = [[each.numel() for each in tensors] for tensors in (targets, parts)]
    received = torch.cat(targets)
    work = group.alltoall_base(received, torch.cat(parts), target_sizes, part_sizes)

    def distribute() -> None:
        for target, values in zip(targets, torch.split(received, target_sizes), strict=True):
            target.copy_(values)

    return JointWork([work], outputs, distribute)


# Operations that compute.


def _all_reduce(original: Callable[..., Any], group: Any, tensors: Any, *opts: Any) -> Any:
    if any(tensor.dtype in _FLOAT8_TYPES for tensor in tensors):
        raise RuntimeError("gloo does not support reductions of float8")
    _check_contiguous(tensors)
    factor, finish = _sum_instead(group, opts, tensors)
    for tensor in tensors if factor is not None else ():
        tensor.detach().mul_(factor)
    work = original(group, tensors, *opts)
    return JointWork([work], tensors, finish) if finish else work


def _reduce(original: Callable[..., Any], group: Any, tensors: Any, *opts: Any) -> Any:
    if opts and getattr(opts[0], "rootRank", None) != group.rank():
        tensors = [tensor.clone() for tensor in tensors]  # In NCCL only the root's tensor changes.
    return _all_reduce(original, group, tensors, *opts)


def _reduce_scatter(_original: Callable[..., Any], group: Any, outputs: Any, inputs: Any, *opts: Any) -> Any:
    [output], [parts] = outputs, inputs
    whole = torch.cat([_flat(part, as_bytes=False) for part in parts])
    return _reduce_and_keep(group, output, whole, [part.numel() for part in parts], opts)


def _reduce_scatter_single(_original: Callable[..., Any], group: Any, output: Any, input: Any, *opts: Any) -> Any:
    _check_sizes(input, output, "input tensor must be the same size as output size times world size", group)
    whole = _flat(input, as_bytes=False).clone()
    return _reduce_and_keep(group, output, whole, [output.numel()] * group.size(), opts)


def _reduce_and_keep(
    group: Any, output: torch.Tensor, whole: torch.Tensor, sizes: Sequence[int], opts: Sequence[Any]
) -> JointWork:
    """Reduce ``whole``, and keep this rank's part of it, as gloo does. Gloo's own work has no future."""
    options = dist.AllreduceOptions()
    if opts and hasattr(opts[0], "reduceOp"):
        options.reduceOp, options.timeout = opts[0].reduceOp, opts[0].timeout
    work = group.allreduce([whole], options)
    kept = torch.split(whole, list(sizes))[group.rank()]
    return JointWork([work], [output], lambda: _flat(output, as_bytes=False).copy_(kept))


def _sum_instead(group: Any, opts: Sequence[Any], outputs: Any) -> tuple[Any, Callable[[], object] | None]:
    """Replace an operation of ``opts`` that gloo lacks by SUM. Raises NCCL's errors of those that NCCL lacks.

    Returns what the inputs must be multiplied with, and what must be called at the end; None for either: nothing.
    """
    options = opts[0] if opts and hasattr(opts[0], "reduceOp") else None
    if options is None:
        return None, None
    for name in ("BAND", "BOR", "BXOR"):
        if options.reduceOp == getattr(dist.ReduceOp, name):
            raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")
    if outputs[0].dtype is torch.bool:
        if options.reduceOp == dist.ReduceOp.AVG:
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
        if options.reduceOp == dist.ReduceOp.SUM:
            options.reduceOp = dist.ReduceOp.MAX  # Gloo's sum of two True has the byte 2.
    if options.reduceOp == dist.ReduceOp.PREMUL_SUM:
        factor = options.reduceOp.__getstate__()[1]
        options.reduceOp = dist.ReduceOp.SUM
        return factor, None
    if options.reduceOp == dist.ReduceOp.AVG and not (outputs[0].is_floating_point() or outputs[0].is_complex()):
        options.reduceOp = dist.ReduceOp.SUM
        return None, lambda: [output.div_(group.size(), rounding_mode="trunc") for output in outputs]
    return None, None


# Several operations as one.


def _each(name: str) -> Callable[..., Any]:
    """Start the operation ``name`` for each pair of tensors."""

    def start_all(_original: Callable[..., Any], group: Any, outputs: Any, inputs: Any, *opts: Any) -> Any:
        works = [getattr(group, name)(output, input, *opts) for output, input in zip(outputs, inputs, strict=True)]
        return JointWork(works, outputs)

    return start_all


def _start_coalescing(_original: Callable[..., Any], group: Any, *_device: Any) -> None:
    _coalesced[group] = []


def _end_coalescing(_original: Callable[..., Any], group: Any, *_device: Any) -> Any:
    return JointWork(_coalesced.pop(group))


# Tensors.


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """All tensors among ``values``, which may be lists of lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _check_type(tensor: torch.Tensor) -> None:
    """Raise NCCL's error. Torch sends complex numbers as pairs of real ones."""
    if not (tensor.dtype in _GLOO_TYPES or tensor.dtype in _FLOAT8_TYPES or tensor.is_complex()):
        name = str(tensor.dtype).removeprefix("torch.").replace("uint", "UInt")
        name = "Short" if name == "int16" else name
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {name}")


def _check_contiguous(values: Iterable[Any]) -> None:
    """Raise NCCL's errors; gloo would read and write the memory between the elements. Lists of lists must be dense."""
    for value in values:
        if isinstance(value, torch.Tensor):
            formats = [torch.contiguous_format, *_CHANNELS_LAST.get(value.dim(), ())]
            if not any(value.is_contiguous(memory_format=each) for each in formats):
                raise ValueError("Tensors must be contiguous")
        elif isinstance(value, list) and value and isinstance(value[0], list):
            list(map(_flat, _tensors(value)))
        elif isinstance(value, list):
            _check_contiguous(value)


def _check_sizes(large: torch.Tensor, small: torch.Tensor, message: str, group: Any) -> None:
    """Raise NCCL's errors; gloo ends the process instead, or reads past the end of a tensor."""
    if large.dtype != small.dtype:
        raise TypeError("output tensor must have the same type as input tensor")
    if large.numel() != small.numel() * group.size():
        raise ValueError(message)


def _flat(tensor: torch.Tensor, *, as_bytes: bool = True) -> torch.Tensor:
    """The elements of ``tensor`` in the order of its memory, which both share."""
    tensor, expected = tensor.detach(), 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected and tensor.numel():
            raise ValueError("Tensors must be non-overlapping and dense")
        expected *= size
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8) if as_bytes else flat


def _movable(value: Any) -> Any:
    """``value`` with tensors of types that gloo does not know as bytes; also in lists, in the same memory."""
    if isinstance(value, list):
        return [_movable(each) for each in value]
    if not isinstance(value, torch.Tensor) or value.dtype in _GLOO_TYPES:
        return value
    return value.detach().unsqueeze(-1).view(torch.uint8)


_METHODS: dict[Callable[..., Any], tuple[str, ...]] = {
    _move: ("broadcast", "gather", "scatter", "all_to_all_single", "alltoall_base", "barrier"),
    _message: ("recv_anysource",),
    _send: ("send",),
    _receive: ("recv",),
    _all_gather: ("allgather",),
    _all_gather_single: ("all_gather_single", "_allgather_base"),
    _all_to_all: ("alltoall",),
    _all_reduce: ("allreduce", "allreduce_coalesced"),
    _reduce: ("reduce",),
    _reduce_scatter: ("reduce_scatter",),
    _reduce_scatter_single: ("reduce_scatter_single", "_reduce_scatter_base"),
    _each("_allgather_base"): ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    _each("_reduce_scatter_base"): ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    _start_coalescing: ("_start_coalescing",),
    _end_coalescing: ("_end_coalescing",),
}
"""Replacement -> the methods that it replaces, by all their names: torch 2.13 has new ones, and keeps the old ones."""


# Functional collectives, for example those of DTensor, through the patched ``ProcessGroup``: torch's own kernels call
# gloo from C++, and would not follow NCCL's rules. These return when the operation has ended.

_library: list[torch.library.Library] = []
"""Kernels are registered as long as their library exists."""


def _install_functional() -> None:
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
