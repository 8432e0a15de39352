"""Replacements for the functions of ``torch.cuda`` and ``torch.accelerator`` that fake CUDA supports.

Runs in a worker of a dry run; ``cuda`` installs them, this module patches nothing.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ddplaunch.features.dry_run.fake_cuda.devices import CAPABILITY, GPU_NAME, MEMORY_BYTES
from ddplaunch.features.dry_run.fake_cuda.streams import Event, StreamContext, Streams

if TYPE_CHECKING:
    from ddplaunch.features.dry_run.fake_cuda.devices import FakeDevices

_Device = type(torch.device("cpu"))

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


class CudaApi(Streams):
    """One method per function of ``torch.cuda`` that does not return a constant."""

    Event = Event
    StreamContext = StreamContext

    def __init__(self, devices: FakeDevices) -> None:
        super().__init__(devices)
        self.default_generators = (torch.default_generator,) * devices.installed

    def is_available(self) -> bool:
        return self._devices.count > 0

    def device_count(self) -> int:
        return self._devices.count

    def init(self) -> None:
        self._devices.initialize()

    def is_initialized(self) -> bool:
        return self._devices.is_initialized

    def current_device(self) -> int:
        return self._devices.index()

    def set_device(self, device: Any) -> None:
        if not (isinstance(device, int) and device < 0):
            self._devices.current = self._devices.index(device)

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        index = self._devices.index(device)
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

    def can_device_access_peer(self, device: Any, peer_device: Any) -> bool:
        return self._devices.index(device) != self._devices.index(peer_device)

    def memory_stats(self, device: Any = None) -> defaultdict[str, int]:
        self._devices.index(device)
        return defaultdict(int)

    memory_stats_as_nested_dict = host_memory_stats = host_memory_stats_as_nested_dict = memory_stats

    def get_rng_state(self, device: Any = "cuda") -> torch.Tensor:
        self._devices.index(device)
        return torch.get_rng_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [torch.get_rng_state() for _ in range(self._devices.count)]

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def cudart(self) -> SimpleNamespace:
        names = ("ProfilerStart", "ProfilerStop", "HostRegister", "HostUnregister")
        functions: dict[str, Any] = {f"cuda{name}": lambda *_args: 0 for name in names}
        free_and_total = _DEVICE_CONSTANTS["mem_get_info"]
        errors = SimpleNamespace(success=0)
        return SimpleNamespace(cudaError=errors, cudaMemGetInfo=lambda _device: free_and_total, **functions)

    def current_accelerator(self, check_available: bool = False) -> torch.device:
        return _Device("cuda")


def cuda_functions(devices: FakeDevices) -> dict[str, Any]:
    """The supported names of ``torch.cuda`` with their replacements."""
    api = CudaApi(devices)
    functions = {name: getattr(api, name) for name in dir(api) if name[0] != "_"}
    # A function, not the class: torch.compile would not distinguish `stream` from `StreamContext`.
    functions["stream"] = lambda stream: StreamContext(stream)
    functions |= {name: _device_constant(devices, value) for name, value in _DEVICE_CONSTANTS.items()}
    functions |= {name: _constant(value) for name, value in _CONSTANTS.items()}
    return functions


def accelerator_functions(cuda: dict[str, Any]) -> dict[str, Any]:
    """The supported names of ``torch.accelerator`` with their replacements, most of them from ``torch.cuda``."""
    dtypes = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
    dtypes |= {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool}
    return {
        **cuda,
        **{name: cuda[cuda_name] for name, cuda_name in _ACCELERATOR.items()},
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
