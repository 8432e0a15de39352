"""Process groups and data parallel wrappers: gloo in place of NCCL, the CPU in place of GPUs.

Runs in a worker of a dry run. Checks device arguments as CUDA would, then drops them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from ddplaunch.features.dry_run.fake_cuda import collectives, works
from ddplaunch.features.dry_run.fake_cuda.patching import (
    arguments_by_name,
    called_by_script,
    replace,
    when_imported,
    wrap,
)
from ddplaunch.features.dry_run.fake_cuda.unsupported import unsupported_class, unsupported_function

if TYPE_CHECKING:
    from ddplaunch.features.dry_run.fake_cuda.devices import FakeDevices

_requested_backends: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Process group -> backend that the script requested; only groups with another backend."""

_NCCL = "torch.distributed.ProcessGroupNCCL"
_C10D = "torch._C._distributed_c10d"
_SYMMETRIC = "torch.distributed._symmetric_memory"
_NCCL_TIMEOUT = timedelta(minutes=10)
_first_group_numbers = itertools.count(0, 1000)


class NcclConfig(SimpleNamespace):
    """Settings of a communicator; they have no effect."""

    def __init__(self) -> None:
        unset = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
        names = (
            "blocking",
            "cga_cluster_size",
            "min_ctas",
            "max_ctas",
            "split_share",
            "traffic_class",
            "collnet_enable",
        )
        super().__init__(net_name=None, **dict.fromkeys(names, unset))


class NcclOptions(SimpleNamespace):
    """Settings of a process group; they have no effect."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__(
            is_high_priority_stream=is_high_priority_stream,
            config=NcclConfig(),
            backend="nccl",
            _timeout=_NCCL_TIMEOUT,
            global_ranks_in_group=[],
            group_name="",
        )


class NcclBackend:
    """The part of a process group that is for GPUs. Subclasses have ``_gloo``, which does the work."""

    _gloo: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)

    def name(self) -> str:
        return "nccl"

    @property
    def options(self) -> NcclOptions:
        return NcclOptions()

    def comm_split_count(self) -> int:
        return 0

    def eager_connect_single_device(self, device: Any = None) -> None:
        pass


def install(devices: FakeDevices) -> None:
    _install_forks()
    _install_groups(devices)
    _install_wrappers(devices)
    collectives.install(lambda group: group in _requested_backends)
    for name in ("torch.cuda", "torch.accelerator"):
        wrap(f"{name}.synchronize", _synchronize)
    wrap("torch.distributed.distributed_c10d.split_group", _split_group)
    _install_nccl_class()
    _install_symmetric_memory()
    replace("torch.nn.SyncBatchNorm.forward", _sync_batch_norm)


def _synchronize(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)
    works.wait_for_all()


def _install_nccl_class() -> None:
    """The class of NCCL's backend, and what torch has only in builds with NCCL."""
    nccl = unsupported_class(_NCCL)
    nccl.Options, nccl.NCCLConfig = NcclOptions, NcclConfig  # type: ignore[attr-defined]

    def get_backend(original: Callable[..., Any], group: Any, device: Any) -> Any:
        real = original(group, device)
        is_nccl = group in _requested_backends and torch.device(device).type == "cuda" and called_by_script()
        return object.__new__(type("ProcessGroupNCCL", (NcclBackend, nccl), {"_gloo": real})) if is_nccl else real

    def backend_name(original: Callable[[Any], str], group: Any) -> str:
        return "nccl" if _requested_backend(group) == "nccl" else original(group)

    wrap("torch.distributed.ProcessGroup._get_backend", get_backend)
    wrap("torch.distributed.ProcessGroup._get_backend_name", backend_name)
    wrap("torch.distributed.ProcessGroup.name", backend_name)
    for module in ("torch.distributed", "torch.distributed.distributed_c10d", _C10D):
        replace(f"{module}.ProcessGroupNCCL", nccl, everywhere=False)
    for name in ("trace", "trace_json"):
        if dump := getattr(sys.modules[_C10D], f"_dump_fr_{name}", None):
            replace(f"{_C10D}._dump_nccl_{name}", dump, everywhere=False)


def _install_symmetric_memory() -> None:
    def refuse() -> None:
        for name in ("empty", "rendezvous", "get_symm_mem_workspace"):
            replace(f"{_SYMMETRIC}.{name}", unsupported_function(f"{_SYMMETRIC}.{name}"))

    when_imported(_SYMMETRIC, refuse)


def _split_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As NCCL: ``split_ranks`` are ranks in the parent group; only this rank's new group is made here."""
    given = arguments_by_name(original, args, kwargs)
    parent: Any = given.get("parent_pg") or dist.group.WORLD
    mine = [ranks for ranks in given.get("split_ranks") or () if parent.rank() in ranks]
    if not mine:
        return None
    return dist.new_group(
        [dist.get_global_rank(parent, rank) for rank in sorted(mine[0])],
        timeout=given.get("timeout"),
        backend=_requested_backend(parent),
        use_local_synchronization=True,
        group_desc=given.get("group_desc"),
    )


def _install_groups(devices: FakeDevices) -> None:
    def create(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = arguments_by_name(original, args, kwargs)
        if given.get("device_id") is not None:
            devices.index(given.pop("device_id"))
        world = dist.group.WORLD
        backend = given.get("backend") or (_requested_backend(world) if world else dist.Backend.UNDEFINED)
        if _includes_nccl(backend):
            given["backend"] = "gloo"
            given["timeout"] = given.get("timeout") or _NCCL_TIMEOUT
            given.pop("pg_options", None)
        created = original(**given)
        group = created or dist.group.WORLD
        if isinstance(group, dist.ProcessGroup):
            _keep_alive(group)
            if _includes_nccl(backend):
                _requested_backends[group] = str(backend).lower()
        return created

    def init(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # After destroy_process_group torch numbers groups from 0, and gloo would find its old addresses in the store.
        dist.distributed_c10d._world.group_count = next(_first_group_numbers)
        return create(original, *args, **kwargs)

    def get_backend(original: Callable[..., str], group: Any = None) -> str:
        real = original(group)
        return dist.Backend(_requested_backend(group or dist.group.WORLD) or real)

    def get_backend_config(original: Callable[..., str], group: Any = None) -> str:
        requested = _requested_backend(group or dist.group.WORLD)
        if requested is None:
            return original(group)
        default = "cpu:gloo,cuda:nccl"  # What torch makes of no choice where there are GPUs.
        return default if requested == dist.Backend.UNDEFINED else str(dist.BackendConfig(dist.Backend(requested)))

    def barrier(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = arguments_by_name(original, args, kwargs)
        for device in given.pop("device_ids", None) or ():
            devices.index(device)
        works.wait_for_all(given.get("group") or dist.group.WORLD)
        return original(**given)

    wrap("torch.distributed.distributed_c10d.init_process_group", init)
    wrap("torch.distributed.distributed_c10d.new_group", create)
    wrap("torch.distributed.distributed_c10d.get_backend", get_backend)
    wrap("torch.distributed.distributed_c10d.get_backend_config", get_backend_config)
    wrap("torch.distributed.distributed_c10d.barrier", barrier)
    # Imports of this name by torch stay unpatched: torch's own code would import NCCL's class.
    wrap("torch.distributed.is_nccl_available", lambda _original: True, everywhere=False)


def _requested_backend(group: Any) -> str | None:
    return _requested_backends.get(group) if isinstance(group, dist.ProcessGroup) else None


def _includes_nccl(backend: Any) -> bool:
    """Whether ``backend`` is NCCL, a ``device:backend`` list with NCCL, or the default; gloo then replaces it."""
    return "nccl" in str(backend).lower() or backend == dist.Backend.UNDEFINED


def _keep_alive(group: dist.ProcessGroup) -> None:
    """Keep the group until the process exits.

    Gloo's destructor waits for its threads and holds the GIL, while a thread that releases the Python objects of the
    last operation waits for the GIL. Scripts whose DDP model outlives ``destroy_process_group`` would sometimes hang.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _install_wrappers(devices: FakeDevices) -> None:
    def without_devices(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        given = arguments_by_name(original, (self, *args), kwargs)
        for device in (*(given.pop("device_ids", None) or ()), given.pop("output_device", None)):
            if device is not None:
                devices.index(device)
        original(**given)

    wrap("torch.nn.parallel.DistributedDataParallel.__init__", without_devices)
    # The original only rejects models on the CPU.
    wrap("torch.nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle", lambda *_: None)
    wrap("torch.nn.parallel.data_parallel._get_available_device_type", lambda _original: None, everywhere=False)


class _SumOverRanks(torch.autograd.Function):
    """All-reduce that autograd can differentiate."""

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
    """SyncBatchNorm on the CPU, with the statistics of all ranks' batches; torch implements it only for GPUs."""
    self._check_input_dim(input)
    group = self.process_group or dist.group.WORLD
    if not self.training or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return _BatchNorm.forward(self, input)
    other_dims = [dim for dim in range(input.dim()) if dim != 1]
    values = input.double()  # The variance is a difference of sums, too inexact in single precision.
    count = values.new_full((1,), input.numel() / input.size(1))
    local = torch.cat([values.sum(other_dims), values.square().sum(other_dims), count])
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


# Forks.

_THREAD = b"pt_gloo_runloop"
_LIMIT_S = 1.0
_PAUSE_S = 0.0005


def _install_forks() -> None:
    """Make every fork of this process wait for ``wait_for_rest``: up to Python 3.11 the child could hang for ever.

    After a collective, a thread of gloo takes the GIL to release Python objects, and creates a thread state for that. A
    lock guards CPython's list of thread states. A child that is forked while another thread holds the lock inherits it
    locked, and waits for it before it runs any Python code (CPython issue 112275; 3.12 and the last releases of 3.10
    and 3.11 reset the lock first). With NCCL these threads of gloo do not exist: a script whose ``DataLoader`` forks
    would hang in its dry run only.
    """
    if sys.version_info < (3, 12):
        os.register_at_fork(before=wait_for_rest)


def wait_for_rest() -> None:
    """Return when no thread of gloo runs, or after 1 s: a collective that is in flight may go on for longer.

    A thread that sleeps waits for work or for the GIL, and this thread keeps the GIL until the child exists.
    """
    deadline = time.monotonic() + _LIMIT_S
    while _runs() and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)  # Gives the GIL to gloo's thread.


def _runs() -> bool:
    return any(map(_is_running, os.listdir("/proc/self/task")))


def _is_running(thread_id: str) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread_id}/stat", "rb") as file:
        name, _, state = file.read().partition(b"(")[2].rpartition(b") ")
        return name == _THREAD and not state.startswith(b"S")
    return False
