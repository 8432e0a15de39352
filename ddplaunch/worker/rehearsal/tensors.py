"""Tensors on a pretended GPU are CPU tensors: every way to name a device leads to the CPU, and every move copies.

Where a tensor was put is remembered with its memory; results of operations are not followed. To the script they are on
the GPU that a tensor was last put on, so that a script which uses one GPU finds everything there, as it would be.
Torch's own code sees the truth: the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nested
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device as torch_device

from ddplaunch.worker.rehearsal.node import Node, device_type, is_number
from ddplaunch.worker.rehearsal.stand_ins import asked_by_script, replace, replace_class, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

_Device = type(torch.device("cpu"))
_PINNED, _CPU = -1, -2  # Where memory can be, beside the GPUs.


def install(node: Node, compiles: bool) -> None:
    _install_factories(node)
    _install_moves(node)
    _install_questions(node)
    _install_names(node, compiles)
    _install_loading(node)


def _install_factories(node: Node) -> None:
    def make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place = _PINNED if kwargs.pop("pin_memory", False) else _place_named(node, kwargs.get("device"))
        if place is not None:
            kwargs["device"] = "cpu"
        made = original(*args, **kwargs)
        _mark(made, place)
        return made

    def take(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
        """What may share memory with its argument does so only on the argument's own device."""
        names = dict(zip(("dtype", "device"), args, strict=False)) | kwargs
        index = node.gpu_index(names.get("device"))
        if index is None:
            return original(data, *args, **kwargs)
        return original(data, **{**names, "device": "cpu"}).to(_Device("cuda", index))

    # Asked now, while torch's names still mean the functions that its device modes will be called with.
    constructors = torch_device._device_constructors()
    names = [f"torch.{name}" for name, value in vars(torch).items() if callable(value) and value in constructors]
    names += [f"torch.{name}" for name in dir(torch) if name.endswith("_like")]
    names += [f"torch.Tensor.{name}" for name in dir(torch.Tensor) if name.startswith("new_")]
    names += ["torch.normal", "torch.nested.nested_tensor", "torch.nested.as_nested_tensor"]
    for name in (*names, "torch.fft.fftfreq", "torch.fft.rfftfreq"):
        wrap(name, take if name in ("torch.as_tensor", "torch.asarray") else make)


def _install_moves(node: Node) -> None:
    def to(original: Callable[..., Any], self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        place = _place_named(node, kwargs.get("device", args[0] if args else None))
        if place is None:
            return original(self, *args, **kwargs)
        given = dict(zip(("device", "dtype", "non_blocking", "copy"), args, strict=False)) | kwargs | {"device": "cpu"}
        if _place(self) != place:
            given["copy"] = True
        moved = original(self, **given)
        _mark(moved, place)
        return moved

    def module_to(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        """To the CPU torch moves a module's tensors by itself, and sees that they are there already."""
        moved = original(self, *args, **kwargs)
        if _place_named(node, kwargs.get("device", args[0] if args else None)) == _CPU:
            for tensor in (*self.parameters(), *self.buffers()):
                _mark(tensor, _CPU)
        return moved

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        return self.to(_Device("cuda", node.index(device)), non_blocking=non_blocking, **kwargs)

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        pinned = self if _place(self) == _PINNED else self.clone()
        _mark(pinned, _PINNED)
        return pinned

    def storage_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        moved = self.clone()
        moved._rehearsed_place = node.gpu_index(_Device("cuda", node.index(device)))
        return moved

    wrap("torch.Tensor.to", to)
    wrap("torch.nn.Module.to", module_to)
    replace("torch.nn.Module.cpu", lambda self: self.to("cpu"))
    replace("torch.Tensor.cuda", cuda)
    replace("torch.Tensor.cpu", lambda self, **kwargs: self.to("cpu", **kwargs))
    replace("torch.Tensor.pin_memory", pin_memory)
    replace("torch.UntypedStorage.cuda", storage_cuda)


def _install_questions(node: Node) -> None:
    is_on_cpu = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]

    def gpu(tensor: torch.Tensor) -> int | None:
        """Where the script is told that ``tensor`` is; None where the truth will do."""
        if not asked_by_script() or not is_on_cpu(tensor):
            return None
        place = _place(tensor)
        place = node.home if place is None else place
        return place if place is not None and place >= 0 else None

    def answer(name: str, on_gpu: Callable[[int], Any]) -> property:
        truth = getattr(torch.Tensor, name).__get__
        return property(lambda self: truth(self) if (index := gpu(self)) is None else on_gpu(index))

    def get_device(original: Callable[..., int], self: torch.Tensor) -> int:
        return original(self) if (index := gpu(self)) is None else index

    replace("torch.Tensor.device", answer("device", lambda index: _Device("cuda", index)))
    replace("torch.Tensor.is_cuda", answer("is_cuda", lambda _index: True))
    replace("torch.Tensor.is_cpu", answer("is_cpu", lambda _index: False))
    replace("torch.Tensor.is_pinned", lambda self, device=None: _place(self) == _PINNED)
    wrap("torch.Tensor.get_device", get_device)


def _install_names(node: Node, compiles: bool) -> None:
    """Devices that are named without a tensor at hand: numbers, default devices, random generators, old types."""

    def name(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original("cuda", int(args[0])) if args and is_number(args[0]) else original(*args, **kwargs)

    def parse_to(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args and is_number(args[0]):
            args = (_Device("cuda", int(args[0])), *args[1:])
        return original(*args, **kwargs)

    def on_cpu(original: Callable[..., Any], device: Any = "cpu") -> Any:
        return original(device if node.gpu_index(device) is None else "cpu")

    def enter(original: Callable[..., Any], self: Any, device: Any) -> Any:
        index = node.gpu_index(device)
        self.named = None if index is None else _Device("cuda", index)
        return original(self, device if index is None else "cpu")

    def default_device(original: Callable[..., Any]) -> Any:
        entered = [getattr(mode, "named", None) for mode in _get_current_function_mode_stack()]  # type: ignore[no-untyped-call]
        return next(filter(None, entered), None) if any(entered) and asked_by_script() else original()

    def cpu_type(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*(a.replace("torch.cuda.", "torch.") if isinstance(a, str) else a for a in args), **kwargs)

    if not compiles:  # The compiler knows torch.device by identity.
        replace_class("torch.device", name)
    wrap("torch._C._nn._parse_to", parse_to)
    replace_class("torch.Generator", on_cpu)
    wrap("torch.utils._device.DeviceContext.__init__", enter)
    wrap("torch.get_default_device", default_device)
    wrap("torch.Tensor.type", cpu_type)
    wrap("torch.set_default_tensor_type", cpu_type)


def _install_loading(node: Node) -> None:
    """A checkpoint that was saved on a GPU says so, and ``map_location`` may name one."""

    def restore(storage: Any, location: str) -> Any:
        index = node.gpu_index(location)
        if index is None:
            return None
        storage._rehearsed_place = index
        return storage

    # Packages are asked in the order of these numbers, torch's for the CPU is 10.
    torch.serialization.register_package(5, lambda storage: None, restore)


def _place_named(node: Node, device: Any) -> int | None:
    """Where an argument says that a tensor shall be; None if it does not, or it is torch's own code that says it.

    Before the first tensor is put on a GPU, the CPU is where all are, and nothing needs to be done.
    """
    index = node.gpu_index(device)
    if index is None and device_type(device) == "cpu" and asked_by_script() and node.home is not None:
        return _CPU
    return index


def _mark(tensor: Any, place: int | None) -> None:
    """Remember on which GPU memory pretends to be; its views and a parameter that takes it over have it too."""
    storage = None if place is None else _storage(tensor)
    if storage is not None:
        storage._rehearsed_place = place


def _place(tensor: torch.Tensor) -> int | None:
    return getattr(_storage(tensor), "_rehearsed_place", None)


def _storage(tensor: torch.Tensor) -> Any:
    if torch.compiler.is_compiling():
        return None
    try:
        return tensor.untyped_storage()
    except (AttributeError, NotImplementedError, RuntimeError):
        return None  # Sparse, or a wrapper of another tensor.
