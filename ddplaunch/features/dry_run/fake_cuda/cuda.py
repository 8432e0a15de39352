"""Patches ``torch.cuda`` and ``torch.accelerator``: every public name is replaced, kept, or made unsupported.

Runs in a worker of a dry run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.cuda.comm
import torch.cuda.nccl

from ddplaunch.features.dry_run.fake_cuda.cuda_api import accelerator_functions, cuda_functions
from ddplaunch.features.dry_run.fake_cuda.patching import replace, wrap
from ddplaunch.features.dry_run.fake_cuda.unsupported import unsupported_class, unsupported_function

if TYPE_CHECKING:
    from types import ModuleType

    from ddplaunch.features.dry_run.fake_cuda.devices import FakeDevices

_KEPT = ("CudaError", "DeferredCudaCallError", "cudaStatus", "caching_allocator_disabled", "device", "device_of")


def install(devices: FakeDevices) -> None:
    cuda = cuda_functions(devices)
    _patch_module(torch.cuda, cuda)
    _patch_module(torch.accelerator, accelerator_functions(cuda))
    _patch_internals(devices)
    for name in [name for name in dir(torch.cuda) if name.endswith("Tensor")]:
        replace(f"torch.cuda.{name}", getattr(torch, name), everywhere=False)
    for module in (torch.cuda.comm, torch.cuda.nccl):
        for name in module.__all__:
            _make_unsupported(f"{module.__name__}.{name}")
    for name in ("_create_jit_fn", "_create_multi_output_jit_fn"):
        _make_unsupported(f"torch.cuda.jiterator.{name}")
    replace("torch.cuda.nccl.version", lambda: (2, 27, 3))
    replace("torch.cuda.nccl.is_available", lambda *_: True)
    replace("torch.Tensor.record_stream", lambda self, stream: None)
    _add_c_functions(devices)
    replace("torch.Stream", cuda["Stream"])
    replace("torch.Event", cuda["Event"])
    wrap("torch.get_device_module", lambda original, device=None: torch.cuda if device is None else original(device))


def _patch_module(module: ModuleType, supported: dict[str, Any]) -> None:
    for name in module.__all__:
        full, original = f"{module.__name__}.{name}", getattr(module, name, None)
        if name in supported:
            _install_function(full, supported[name])
        elif name in _KEPT or name.endswith(("Tensor", "Storage")) or not callable(original):
            continue
        elif isinstance(original, type):
            replace(full, unsupported_class(full))
        else:
            _make_unsupported(full)


def _install_function(name: str, function: Any) -> None:
    if isinstance(function, type) or not callable(function):
        replace(name, function)
    else:
        # A new function for each name: torch.compile distinguishes functions by identity.
        wrap(name, lambda _original, *args, **kwargs: function(*args, **kwargs))


def _make_unsupported(name: str) -> None:
    _install_function(name, unsupported_function(name))


def _add_c_functions(devices: FakeDevices) -> None:
    """Functions of torch's C++ module that scripts call themselves; a build for the CPU lacks them."""

    def set_device(index: int) -> None:
        devices.current = devices.index(index)

    replace("torch._C._cuda_getDeviceCount", lambda: devices.count, everywhere=False)
    replace("torch._C._cuda_getDevice", devices.index, everywhere=False)
    replace("torch._C._cuda_setDevice", set_device, everywhere=False)
    replace("torch._C._cuda_synchronize", lambda: None, everywhere=False)
    replace("torch._C._cuda_sleep", lambda _cycles: None, everywhere=False)


def _patch_internals(devices: FakeDevices) -> None:
    """Replace the private functions behind ``torch.cuda.device``, CUDA's initialization and the extension builder."""

    def exchange(_original: Any, index: int) -> int:
        before = devices.current
        if index >= 0:
            devices.current = devices.index(index)
        return before

    def device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
        index = getattr(device, "idx", device)
        return index if isinstance(index, int) else devices.index(index)

    wrap("torch.cuda._exchange_device", exchange)
    wrap("torch.cuda._maybe_exchange_device", exchange)
    replace("torch.cuda._utils._get_device_index", device_index)
    replace("torch.cuda._lazy_init", devices.initialize)
    # The extension builder then reports that there is no CUDA compiler, even where there is one.
    replace("torch.cuda._is_compiled", lambda: False)
    replace("torch.backends.cuda.is_built", lambda: True)
    for name in ("preferred_linalg_library", "preferred_blas_library"):
        wrap(f"torch.backends.cuda.{name}", lambda original, *_args, **_kwargs: original())
    replace("torch.backends.cudnn.is_available", lambda: True, everywhere=False)
    replace("torch.backends.cudnn.version", lambda: 91002, everywhere=False)
    replace("torch.version.cuda", torch.version.cuda or "12.8", everywhere=False)
