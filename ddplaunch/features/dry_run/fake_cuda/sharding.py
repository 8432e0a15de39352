"""Device meshes and sharded tensors: a mesh of GPUs is one of CPUs, and the script sees GPUs.

Runs in a worker of a dry run. Torch's own code sees a mesh of CPUs, and shards on the CPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh

from ddplaunch.features.dry_run.fake_cuda.devices import Device, FakeDevices
from ddplaunch.features.dry_run.fake_cuda.patching import (
    arguments_by_name,
    called_by_script,
    replace,
    when_imported,
    wrap,
)

_MESH = "torch.distributed.device_mesh.DeviceMesh"
_DTENSOR = "torch.distributed.tensor._api"
_FSDP = "torch.distributed.fsdp"


def install(devices: FakeDevices) -> None:
    _install_meshes(devices)
    _install_fsdp(devices)
    when_imported(_DTENSOR, lambda: wrap(f"{_DTENSOR}.distribute_tensor", _distribute_tensor))
    when_imported(_RANDOM, _install_sharded_random)


def _install_meshes(devices: FakeDevices) -> None:
    def init(original: Callable[..., None], self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type != "cuda":
            return original(self, device_type, *args, **kwargs)
        if not devices.is_initialized and "LOCAL_RANK" in os.environ:
            devices.current = devices.index(int(os.environ["LOCAL_RANK"]))
        devices.gpu_index(device_type)  # From now on, tensors that nobody has moved are this GPU's.
        self._fake_type = device_type
        return original(self, "cpu", *args, **kwargs)

    def device_type(self: Any) -> Any:
        return _fake_type(self) if called_by_script() else self._device_type

    def set_device_type(self: Any, device_type: str) -> None:
        self._device_type = device_type  # Torch 2.8 has no other attribute for it.

    def text(original: Callable[[Any], str], self: Any) -> str:
        return original(self).replace("'cpu'", f"'{_fake_type(self)}'")

    wrap(f"{_MESH}.__init__", init)
    wrap(f"{_MESH}.__repr__", text)
    replace(f"{_MESH}.device_type", property(device_type, set_device_type))


def _fake_type(mesh: Any) -> str:
    """The type of the devices that the script made ``mesh``, or the mesh that it is a part of, for."""
    of_torch_2_8 = getattr(torch.distributed.device_mesh._mesh_resources, "get_root_mesh", lambda mesh: mesh)
    root = getattr(mesh, "_root_mesh", None) or of_torch_2_8(mesh)
    return str(getattr(root, "_fake_type", mesh._device_type))


def _distribute_tensor(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Copy a tensor that is on the CPU, as the move to the GPU does: the broadcast would change it."""
    given = arguments_by_name(original, args, kwargs)
    mesh, tensor = given.get("device_mesh"), given["tensor"]
    if mesh is not None and _fake_type(mesh) == "cuda" and not tensor.is_meta and not tensor.is_cuda:
        given["tensor"] = tensor.to(Device("cuda", torch.cuda.current_device()))
    return original(**given)


def _install_fsdp(devices: FakeDevices) -> None:
    def shard_on_cpu(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        given = arguments_by_name(original, (self, *args), kwargs)
        devices.index(given.get("device_id"))
        original(**{**given, "device_id": torch.device("cpu")})

    def move(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        """Copy: FSDP frees the memory "on the GPU" after a move to the CPU."""
        original(self, *args, **{**kwargs, "copy": True})

    def of_handle(original: Callable[..., Any], self: Any, name: str) -> Any:
        """The GPUs of a node, not its CPUs: hybrid sharding makes groups of as many ranks."""
        return (lambda: devices.count) if name == "device_count" else original(self, name)

    full, flat, init, common = (
        f"{_FSDP}.{name}" for name in ("fully_sharded_data_parallel", "_flat_param", "_init_utils", "_common_utils")
    )
    when_imported(full, lambda: wrap(f"{full}.FullyShardedDataParallel.__init__", shard_on_cpu))
    when_imported(flat, lambda: wrap(f"{flat}.FlatParamHandle.flat_param_to", move))
    when_imported(common, lambda: wrap(f"{common}._FSDPDeviceHandle.__getattr__", of_handle))
    # It refuses the broadcast of parameters that are on the CPU.
    when_imported(init, lambda: wrap(f"{init}._check_module_states_for_sync_module_states", lambda *_: None))
    # FSDP synchronizes the current stream of its device, which raises for the CPU's stream.
    replace("torch.cpu.Stream.synchronize", lambda self: None)


# Random numbers.

_RANDOM = "torch.distributed.tensor._random"


def _install_sharded_random() -> None:
    """Random numbers of sharded tensors: shards differ, and replicas are equal, as on GPUs.

    On a GPU every rank uses its part of one sequence of numbers, by an offset into it. The CPU's generator has no
    offset: a seed is drawn from it, and each shard has its own sequence.
    """
    replace(f"{_RANDOM}.is_rng_supported_mesh", lambda device_mesh: True)
    replace(f"{_RANDOM}.OffsetBasedRNGTracker.__init__", _init_tracker)
    replace(f"{_RANDOM}.OffsetBasedRNGTracker._distribute_region", _distribute_region)


def _init_tracker(self: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
    self._device, self._device_handle, self._use_distribute_region = torch.device("cpu"), torch.cuda, True
    if run_state_sync:
        state = torch.get_rng_state()
        dist.broadcast(state, 0)
        torch.set_rng_state(state)


@contextlib.contextmanager
def _distribute_region(self: Any, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
    """Let the block draw numbers for one shard. Afterwards the generator's state is equal on all ranks."""
    used = generator or torch.default_generator
    if not self._use_distribute_region:
        yield
        return
    seed = int(torch.randint(1 << 62, (), generator=used))
    state = used.get_state()
    used.manual_seed(seed + _shard(spec))
    try:
        yield
    finally:
        used.set_state(state)


def _shard(spec: Any) -> int:
    """Number of this rank's shard: equal on ranks with the same part of the tensor."""
    coordinate, number = spec.mesh.get_coordinate() or (), 0
    for index, placement, size in zip(coordinate, spec.placements, spec.mesh.shape, strict=False):
        if not (placement.is_replicate() or placement.is_partial()):
            number = number * size + index
    return number
