"""Patches ``torch.cuda`` and ``torch.accelerator``: every public name is replaced, kept, or made unsupported.

Runs in a worker of a dry run.
"""

from __future__ import annotations

import pkgutil
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.cuda.comm
import torch.cuda.nccl

from ddplaunch.features.dry_run.fake_cuda.devices import CAPABILITY, GPU_NAME, MEMORY_BYTES, Device, FakeDevices
from ddplaunch.features.dry_run.fake_cuda.patching import replace, wrap
from ddplaunch.features.dry_run.fake_cuda.streams import Event, StreamContext, Streams
from ddplaunch.features.dry_run.fake_cuda.unsupported import unsupported_class, unsupported_function

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
    for library in ("blas", "linalg"):
        _store_preferred(library)
    plans = torch.backends.cuda.cuFFTPlanCache
    plans.size, plans.max_size, plans.clear = 0, 4096, lambda self: None  # type: ignore[assignment]
    replace("torch.backends.cudnn.is_available", lambda: True, everywhere=False)
    replace("torch.backends.cudnn.version", lambda: 91002, everywhere=False)
    replace("torch.version.cuda", torch.version.cuda or "12.8", everywhere=False)


def _store_preferred(library: str) -> None:
    """Store what the script prefers; the CPU build refuses it."""
    name = f"torch._C._{{}}_{library}_preferred_backend"
    stored = [pkgutil.resolve_name(name.format("get"))()]
    replace(name.format("get"), lambda: stored[0], everywhere=False)
    replace(name.format("set"), lambda backend: stored.__setitem__(0, backend), everywhere=False)


# What is supported.

_SEGMENT_BYTES = 2 << 20
"""Minimum that CUDA's allocator reserves. Not zero: scripts divide by it to print how full the memory is."""

_DEVICE_CONSTANTS: dict[str, Any] = {
    "get_device_name": GPU_NAME,
    "get_device_capability": CAPABILITY,
    "mem_get_info": (MEMORY_BYTES - _SEGMENT_BYTES, MEMORY_BYTES),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "device_memory_used"), 0),
    **dict.fromkeys(("memory_reserved", "max_memory_reserved", "memory_cached", "max_memory_cached"), _SEGMENT_BYTES),
    **dict.fromkeys(("memory_usage", "utilization", "temperature", "power_draw", "clock_rate"), 0),
    "memory_snapshot": [],
    "memory_summary": "simulated on the CPU: no GPU memory\n",
    "list_gpu_processes": "simulated on the CPU: no GPU processes",
    "get_per_process_memory_fraction": 1.0,
    **dict.fromkeys(("synchronize", "reset_peak_memory_stats", "reset_accumulated_memory_stats"), None),
    **dict.fromkeys(("reset_max_memory_allocated", "reset_max_memory_cached"), None),
}
"""Functions that return a constant; their first argument is a device and is checked."""

_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("is_bf16_supported", "is_tf32_supported"), True),
    "get_arch_list": ["sm_90"],
    "get_gencode_flags": "-gencode compute=compute_90,code=sm_90",
    "is_current_stream_capturing": False,
    "get_sync_debug_mode": 0,
    "get_allocator_backend": "native",
    **dict.fromkeys(("current_blas_handle", "current_solver_handle"), 1),
    **dict.fromkeys(("empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "seed", "seed_all"), None),
    **dict.fromkeys(("set_rng_state", "set_rng_state_all", "set_sync_debug_mode", "check_error"), None),
    **dict.fromkeys(("set_per_process_memory_fraction", "caching_allocator_enable"), None),
    **dict.fromkeys(("reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats"), None),
}
"""Functions that return a constant and ignore their arguments."""

_ACCELERATOR = {
    "current_device_idx": "current_device",
    "current_device_index": "current_device",
    "set_device_idx": "set_device",
    "set_device_index": "set_device",
    "get_memory_info": "mem_get_info",
    "empty_host_cache": "empty_cache",
}


def cuda_functions(devices: FakeDevices) -> dict[str, Any]:
    """The supported names of ``torch.cuda`` with their replacements."""
    streams = Streams(devices)

    def set_device(device: Any) -> None:
        if not (isinstance(device, int) and device < 0):
            devices.current = devices.index(device)

    def memory_stats(device: Any = None) -> defaultdict[str, int]:
        devices.index(device)
        return defaultdict(int)

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        devices.index(device)
        return torch.get_rng_state()

    return {
        **{name: _device_constant(devices, value) for name, value in _DEVICE_CONSTANTS.items()},
        **{name: _constant(value) for name, value in _CONSTANTS.items()},
        **dict.fromkeys(("memory_stats", "memory_stats_as_nested_dict"), memory_stats),
        **dict.fromkeys(("host_memory_stats", "host_memory_stats_as_nested_dict"), memory_stats),
        "default_generators": (torch.default_generator,) * devices.installed,
        "is_available": lambda: devices.count > 0,
        "device_count": lambda: devices.count,
        "init": devices.initialize,
        "is_initialized": lambda: devices.is_initialized,
        "current_device": lambda: devices.index(),
        "set_device": set_device,
        "get_device_properties": lambda device=None: _properties(devices.index(device)),
        "can_device_access_peer": lambda device, peer_device: devices.index(device) != devices.index(peer_device),
        "get_rng_state": get_rng_state,
        "get_rng_state_all": lambda: [torch.get_rng_state() for _ in range(devices.count)],
        "initial_seed": torch.initial_seed,
        "cudart": _cudart,
        "Event": Event,
        "Stream": streams.Stream,
        "StreamContext": StreamContext,
        # A function, not the class: torch.compile would not distinguish `stream` from `StreamContext`.
        "stream": lambda stream: StreamContext(stream),
        "default_stream": streams.default_stream,
        "current_stream": streams.current_stream,
        "set_stream": streams.set_stream,
    }


def _properties(index: int) -> SimpleNamespace:
    return SimpleNamespace(
        name=GPU_NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=MEMORY_BYTES,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
        L2_cache_size=50 << 20,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        pci_domain_id=0,
        pci_bus_id=index + 1,
        pci_device_id=0,
        uuid=f"00000000-0000-0000-0000-{index:012}",
    )


def _cudart() -> SimpleNamespace:
    names = ("ProfilerStart", "ProfilerStop", "HostRegister", "HostUnregister")
    functions: dict[str, Any] = {f"cuda{name}": lambda *_args: 0 for name in names}
    free_and_total = _DEVICE_CONSTANTS["mem_get_info"]
    errors = SimpleNamespace(success=0)
    return SimpleNamespace(cudaError=errors, cudaMemGetInfo=lambda _device: free_and_total, **functions)


def accelerator_functions(cuda: dict[str, Any]) -> dict[str, Any]:
    """The supported names of ``torch.accelerator`` with their replacements, most of them from ``torch.cuda``."""
    dtypes = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
    dtypes |= {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool}
    return {
        **cuda,
        **{name: cuda[cuda_name] for name, cuda_name in _ACCELERATOR.items()},
        "current_accelerator": lambda check_available=False: Device("cuda"),
        "device_index": torch.cuda.device,
        "get_device_capability": lambda _device=None: {"supported_dtypes": dtypes},
    }


def _device_constant(devices: FakeDevices, value: Any) -> Any:
    def constant(device: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        devices.index(device)
        return value

    return constant


def _constant(value: Any) -> Any:
    return lambda *_args, **_kwargs: value
