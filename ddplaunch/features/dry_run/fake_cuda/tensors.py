"""Tensors on fake GPUs: CPU tensors whose memory records its fake location; every move between locations copies.

Runs in a worker of a dry run. The location of a result is not tracked: the script sees it on the GPU that received the
last tensor, which is right for scripts that use one GPU. Torch's own code sees the real location, the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nested
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device as torch_device

from ddplaunch.features.dry_run.fake_cuda.devices import Device, FakeDevices, device_type, is_number
from ddplaunch.features.dry_run.fake_cuda.patching import (
    called_by_script,
    replace,
    replace_class,
    when_imported,
    wrap,
)

_SHARDED = "torch.distributed._shard.sharded_tensor.api"
_PINNED, _CPU = -1, -2  # Fake locations besides the numbers of GPUs.


def install(devices: FakeDevices, compile_on_cpu: bool) -> None:
    _install_factories(devices)
    _install_moves(devices)
    _install_device_queries(devices)
    _install_storages(devices)
    _install_device_names(devices, compile_on_cpu)
    _install_loading(devices)


def _install_factories(devices: FakeDevices) -> None:
    def create(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        location = _PINNED if kwargs.pop("pin_memory", False) else _requested_location(devices, kwargs.get("device"))
        if location is not None:
            kwargs["device"] = "cpu"
        created = original(*args, **kwargs)
        _set_location(created, location)
        return created

    def convert(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
        """``as_tensor`` and ``asarray`` share memory with their argument only on the argument's device."""
        names = dict(zip(("dtype", "device"), args, strict=False)) | kwargs
        index = devices.gpu_index(names.get("device"))
        if index is None:
            return original(data, *args, **kwargs)
        return original(data, **{**names, "device": "cpu"}).to(Device("cuda", index))

    # Read before the names are patched: torch's device modes compare with the original functions.
    constructors = torch_device._device_constructors()
    names = [f"torch.{name}" for name, value in vars(torch).items() if callable(value) and value in constructors]
    names += [f"torch.{name}" for name in dir(torch) if name.endswith("_like")]
    names += [f"torch.Tensor.{name}" for name in dir(torch.Tensor) if name.startswith("new_")]
    names += ["torch.normal", "torch.nested.nested_tensor", "torch.nested.as_nested_tensor"]
    for name in (*names, "torch.fft.fftfreq", "torch.fft.rfftfreq"):
        wrap(name, convert if name in ("torch.as_tensor", "torch.asarray") else create)


def _install_moves(devices: FakeDevices) -> None:
    def to(original: Callable[..., Any], self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        location = _requested_location(devices, kwargs.get("device", args[0] if args else None))
        if location is None:
            return original(self, *args, **kwargs)
        given = dict(zip(("device", "dtype", "non_blocking", "copy"), args, strict=False)) | kwargs | {"device": "cpu"}
        if _location_of(self) != location:
            given["copy"] = True
        moved = original(self, **given)
        _set_location(moved, location)
        return moved

    def module_to(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the move to the CPU, which torch skips because the tensors are there already."""
        moved = original(self, *args, **kwargs)
        if _requested_location(devices, kwargs.get("device", args[0] if args else None)) == _CPU:
            for tensor in (*self.parameters(), *self.buffers()):
                _set_location(tensor, _CPU)
        return moved

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        return self.to(Device("cuda", devices.index(device)), non_blocking=non_blocking, **kwargs)

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        pinned = self if _location_of(self) == _PINNED else self.clone()
        _set_location(pinned, _PINNED)
        return pinned

    def storage_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        moved = self.clone()
        moved._fake_location = devices.gpu_index(Device("cuda", devices.index(device)))
        return moved

    wrap("torch.Tensor.to", to)
    wrap("torch.nn.Module.to", module_to)
    replace("torch.nn.Module.cpu", lambda self: self.to("cpu"))
    replace("torch.Tensor.cuda", cuda)
    replace("torch.Tensor.cpu", lambda self, **kwargs: self.to("cpu", **kwargs))
    replace("torch.Tensor.pin_memory", pin_memory)
    replace("torch.UntypedStorage.cuda", storage_cuda)
    # Parameters of lazy modules allow only these methods, by identity, until the first forward pass.
    mixin = torch.nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
    mixin._allowed_methods = [*mixin._allowed_methods, torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu]


def _install_device_queries(devices: FakeDevices) -> None:
    is_on_cpu = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
    real_device = torch.Tensor.device.__get__

    def gpu(tensor: torch.Tensor) -> int | None:
        """The GPU that ``tensor`` is on for the caller; None if the caller sees the real device."""
        with torch._C.DisableTorchFunctionSubclass():  # A ShardedTensor does not know these attributes.
            if not called_by_script() or not is_on_cpu(tensor):
                return None
        location = _location_of(tensor)
        location = devices.last_gpu if location is None else location
        return location if location is not None and location >= 0 else None

    def device_property(name: str, on_gpu: Callable[[int], Any]) -> property:
        real = getattr(torch.Tensor, name).__get__
        return property(lambda self: real(self) if (index := gpu(self)) is None else on_gpu(index))

    def get_device(original: Callable[..., int], self: torch.Tensor) -> int:
        return original(self) if (index := gpu(self)) is None else index

    def type_(original: Callable[..., Any], self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) and gpu(self) is not None else found

    replace("torch.Tensor.device", device_property("device", lambda index: Device("cuda", index)))
    when_imported(_SHARDED, lambda: _install_device_of_sharded_tensors(real_device))
    replace("torch.Tensor.is_cuda", device_property("is_cuda", lambda _index: True))
    replace("torch.Tensor.is_cpu", device_property("is_cpu", lambda _index: False))
    replace("torch.Tensor.is_pinned", lambda self, device=None: _location_of(self) == _PINNED)
    wrap("torch.typename", lambda original, thing: thing.type() if torch.is_tensor(thing) else original(thing))
    wrap("torch.Tensor.get_device", get_device)
    wrap("torch.Tensor.type", type_)


def _install_device_of_sharded_tensors(real_device: Any) -> None:
    """Torch looks the function of an attribute up by its getter, and may have done so with the one that is replaced."""
    operations = sys.modules[_SHARDED]._SHARDED_OPS
    if real_device in operations:
        operations[torch.Tensor.device.__get__] = operations[real_device]


def _install_storages(devices: FakeDevices) -> None:
    """The device of a tensor's memory."""
    real = torch.UntypedStorage.device.__get__

    def device(storage: Any) -> Any:
        location = getattr(storage, "_fake_location", devices.last_gpu)
        if location is None or location < 0 or not called_by_script() or real(storage).type != "cpu":
            return real(storage)
        return Device("cuda", location)

    replace("torch.UntypedStorage.device", property(device))
    replace("torch.UntypedStorage.is_cuda", property(lambda self: device(self).type == "cuda"))
    replace("torch.UntypedStorage.get_device", lambda self: -1 if (index := device(self).index) is None else index)
    replace("torch.TypedStorage.device", property(lambda self: device(self._untyped_storage)))
    replace("torch.TypedStorage.is_cuda", property(lambda self: device(self._untyped_storage).type == "cuda"))


def _install_device_names(devices: FakeDevices, compile_on_cpu: bool) -> None:
    """Patch functions that take a device but no tensor: device numbers, default devices, generators, legacy types."""

    def name(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original("cuda", int(args[0])) if args and is_number(args[0]) else original(*args, **kwargs)

    def parse_to(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args and is_number(args[0]):
            args = (Device("cuda", int(args[0])), *args[1:])
        return original(*args, **kwargs)

    def on_cpu(original: Callable[..., Any], device: Any = "cpu") -> Any:
        return original(device if devices.gpu_index(device) is None else "cpu")

    def enter(original: Callable[..., Any], self: Any, device: Any) -> Any:
        index = devices.gpu_index(device)
        self.fake_device = None if index is None else Device("cuda", index)
        return original(self, device if index is None else "cpu")

    def default_device(original: Callable[..., Any]) -> Any:
        entered = [getattr(mode, "fake_device", None) for mode in _get_current_function_mode_stack()]  # type: ignore[no-untyped-call]
        return next(filter(None, entered), None) if any(entered) and called_by_script() else original()

    def cpu_type(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*(a.replace("torch.cuda.", "torch.") if isinstance(a, str) else a for a in args), **kwargs)

    if not compile_on_cpu:  # torch.compile recognises torch.device by identity.
        replace_class("torch.device", name)
    wrap("torch._C._nn._parse_to", parse_to)
    replace_class("torch.Generator", on_cpu)
    wrap("torch.utils._device.DeviceContext.__init__", enter)
    wrap("torch.get_default_device", default_device)
    wrap("torch.Tensor.type", cpu_type)
    wrap("torch.set_default_tensor_type", cpu_type)


def _install_loading(devices: FakeDevices) -> None:
    """Load checkpoints that were saved on a GPU, or with a GPU as ``map_location``."""

    def restore(storage: Any, location: str) -> Any:
        index = devices.gpu_index(location)
        if index is None:
            return None
        storage._fake_location = index
        return storage

    # Torch tries the packages in the order of these numbers; its CPU package has 10.
    torch.serialization.register_package(5, lambda storage: None, restore)


def _requested_location(devices: FakeDevices, device: Any) -> int | None:
    """The location that a ``device`` argument requests; None if it requests none, or torch's own code passes it.

    Before the first tensor is on a fake GPU all tensors are on the CPU, and requests for the CPU need no record.
    """
    index = devices.gpu_index(device)
    if index is None and device_type(device) == "cpu" and called_by_script() and devices.last_gpu is not None:
        return _CPU
    return index


def _set_location(tensor: Any, location: int | None) -> None:
    """Record the fake location of the tensor's memory; views and parameters that share it have that location too."""
    storage = None if location is None else _storage(tensor)
    if storage is not None:
        storage._fake_location = location


def _location_of(tensor: torch.Tensor) -> int | None:
    return getattr(_storage(tensor), "_fake_location", None)


def _storage(tensor: torch.Tensor) -> Any:
    if torch.compiler.is_compiling():
        return None
    try:
        return tensor.untyped_storage()
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None  # A sparse tensor, a wrapper of another tensor, or a lazy module's parameter.
