"""Process groups, and what trains over them: NCCL becomes gloo, and what wants GPU numbers gets none."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import os
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh
from torch.nn.modules.batchnorm import _BatchNorm

from ddplaunch.worker.rehearsal import refusal
from ddplaunch.worker.rehearsal.stand_ins import asked_by_script, replace, when_imported, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.worker.rehearsal.node import Node

_asked: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The backend that the script has asked for, for each group that has another."""

_NCCL_TIMEOUT = timedelta(minutes=10)
_first_names = itertools.count(0, 1000)


def install(node: Node) -> None:
    _install_groups(node)
    _install_wrappers(node)
    replace("torch.distributed.distributed_c10d.split_group", refusal.refusing("torch.distributed.split_group"))
    nccl = "torch.distributed.ProcessGroupNCCL"
    replace(nccl, refusal.refusing_class(nccl), everywhere=False)
    replace("torch.nn.SyncBatchNorm.forward", _sync_batch_norm)


def _install_groups(node: Node) -> None:
    def create(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = _named(original, args, kwargs)
        if given.get("device_id") is not None:
            node.index(given.pop("device_id"))
        world = dist.group.WORLD
        backend = given.get("backend") or (_asked_for(world) if world else dist.Backend.UNDEFINED)
        if _wants_nccl(backend):
            given["backend"] = "gloo"
            given["timeout"] = given.get("timeout") or _NCCL_TIMEOUT
            given.pop("pg_options", None)
        created = original(**given)
        group = created or dist.group.WORLD
        if isinstance(group, dist.ProcessGroup):
            _keep(group)
            if _wants_nccl(backend):
                _asked[group] = str(backend).lower()
        return created

    def init(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Torch counts from 0 again after destroy_process_group, and gloo then meets its old addresses in the store.
        dist.distributed_c10d._world.group_count = next(_first_names)
        return create(original, *args, **kwargs)

    def get_backend(original: Callable[..., str], group: Any = None) -> str:
        real = original(group)
        return dist.Backend(_asked_for(group or dist.group.WORLD) or real) if asked_by_script() else real

    def barrier(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = _named(original, args, kwargs)
        for device in given.pop("device_ids", None) or ():
            node.index(device)
        return original(**given)

    wrap("torch.distributed.distributed_c10d.init_process_group", init)
    wrap("torch.distributed.distributed_c10d.new_group", create)
    wrap("torch.distributed.distributed_c10d.get_backend", get_backend)
    wrap("torch.distributed.distributed_c10d.barrier", barrier)
    # Torch's own code would look for NCCL's class.
    wrap("torch.distributed.is_nccl_available", lambda _original: True, everywhere=False)


def _named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by their names, those of a ``**kwargs`` too."""
    named = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    rest = named.pop("kwargs", {})
    return {**named, **rest}


def _asked_for(group: Any) -> str | None:
    return _asked.get(group) if isinstance(group, dist.ProcessGroup) else None


def _wants_nccl(backend: Any) -> bool:
    """Also a list of ``device:backend`` that has it, or the default; gloo then serves all tensors, the CPU's."""
    return "nccl" in str(backend).lower() or backend == dist.Backend.UNDEFINED


def _keep(group: dist.ProcessGroup) -> None:
    """Let the group live as long as the process.

    Gloo's destructor waits for its threads with the GIL held, and a thread that lets go of the last operation's Python
    objects waits for the GIL: scripts whose DDP model outlives ``destroy_process_group`` hang now and then.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _install_wrappers(node: Node) -> None:
    def without_devices(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        given = _named(original, (self, *args), kwargs)
        for device in (*(given.pop("device_ids", None) or ()), given.pop("output_device", None)):
            if device is not None:
                node.index(device)
        original(**given)

    def shard_on_cpu(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        given = _named(original, (self, *args), kwargs)
        node.index(given.get("device_id"))
        original(**{**given, "device_id": torch.device("cpu")})

    def mesh(original: Callable[..., None], self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type != "cuda":
            return original(self, device_type, *args, **kwargs)
        if not node.is_used and "LOCAL_RANK" in os.environ:
            node.current = node.index(int(os.environ["LOCAL_RANK"]))
        return original(self, "cpu", *args, **kwargs)

    wrap("torch.nn.parallel.DistributedDataParallel.__init__", without_devices)
    # It does nothing but to refuse them on the CPU.
    wrap("torch.nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle", lambda *_: None)
    wrap("torch.distributed.device_mesh.DeviceMesh.__init__", mesh)

    def move(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        """To the CPU, after which the memory it had on the "GPU" is freed."""
        original(self, *args, **{**kwargs, "copy": True})

    fsdp, flat = "torch.distributed.fsdp.fully_sharded_data_parallel", "torch.distributed.fsdp._flat_param"
    when_imported(fsdp, lambda: wrap(f"{fsdp}.FullyShardedDataParallel.__init__", shard_on_cpu))
    when_imported(flat, lambda: wrap(f"{flat}.FlatParamHandle.flat_param_to", move))
    # FSDP waits for the current stream of its device, and the CPU's cannot be waited for.
    replace("torch.cpu.Stream.synchronize", lambda self: None)
    wrap("torch.nn.parallel.data_parallel._get_available_device_type", lambda _original: None, everywhere=False)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, group: Any, values: torch.Tensor) -> torch.Tensor:
        context.group = group
        return _sum(values, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _sum(gradient, context.group)


def _sum(values: torch.Tensor, group: Any) -> torch.Tensor:
    values = values.clone()
    dist.all_reduce(values, group=group)
    return values


def _sync_batch_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    """The statistics of all ranks' batches, as on GPUs; torch has kernels for it only there."""
    self._check_input_dim(input)
    group = self.process_group or dist.group.WORLD
    if not self.training or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return _BatchNorm.forward(self, input)
    rest = [dim for dim in range(input.dim()) if dim != 1]
    values = input.double()  # In single precision the variance, a difference of sums, would lose its digits.
    count = values.new_full((1,), input.numel() / input.size(1))
    local = torch.cat([values.sum(rest), values.square().sum(rest), count])
    sums = _SumOverRanks.apply(group, local)  # type: ignore[no-untyped-call]
    count = sums[-1].detach()
    mean, square = (sums[:-1] / count).chunk(2)
    variance = square - mean.square()
    if self.track_running_stats:
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.item()
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var.dtype), share)
    shape = [1, -1] + [1] * (input.dim() - 2)
    output: torch.Tensor = (values - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
    if self.affine:
        output = output * self.weight.view(shape) + self.bias.view(shape)
    return output.to(input.dtype)
