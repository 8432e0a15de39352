"""What stands for each name of ``torch.cuda`` and ``torch.accelerator`` that can be answered; replaces nothing."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ddplaunch.worker.rehearsal.streams import Event, StreamContext, Streams

if TYPE_CHECKING:
    from ddplaunch.worker.rehearsal.node import Node

_Device = type(torch.device("cpu"))

_SEGMENT_BYTES = 2 << 20
"""The least that CUDA's allocator reserves: zero would divide the scripts that print how full it is."""

_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "device_memory_used"), 0),
    **dict.fromkeys(("memory_reserved", "max_memory_reserved", "memory_cached", "max_memory_cached"), _SEGMENT_BYTES),
    **dict.fromkeys(("memory_usage", "utilization", "temperature", "power_draw", "clock_rate"), 0),
    "memory_snapshot": [],
    "memory_summary": "rehearsed on the CPU: no GPU memory\n",
    "list_gpu_processes": "rehearsed on the CPU: no GPU processes",
    "get_per_process_memory_fraction": 1.0,
    **dict.fromkeys(("synchronize", "reset_peak_memory_stats", "reset_accumulated_memory_stats"), None),
    **dict.fromkeys(("reset_max_memory_allocated", "reset_max_memory_cached"), None),
}
"""What each device answers; the argument is a device and is checked."""

_NOTHING = (
    *("empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "seed", "seed_all", "check_error"),
    *("set_rng_state", "set_rng_state_all", "set_sync_debug_mode", "set_per_process_memory_fraction"),
    *("caching_allocator_enable", "reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats"),
)
_ACCELERATOR = {
    "current_device_idx": "current_device",
    "current_device_index": "current_device",
    "set_device_idx": "set_device",
    "set_device_index": "set_device",
    "get_memory_info": "mem_get_info",
    "empty_host_cache": "empty_cache",
}


class Answers(Streams):
    """One method for each function of ``torch.cuda`` that has more to say than a constant."""

    Event = Event
    StreamContext = StreamContext

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.default_generators = (torch.default_generator,) * node.devices

    def is_available(self) -> bool:
        return self._node.count > 0

    def device_count(self) -> int:
        return self._node.count

    def init(self) -> None:
        self._node.use()

    def is_initialized(self) -> bool:
        return self._node.is_used

    def current_device(self) -> int:
        return self._node.index()

    def set_device(self, device: Any) -> None:
        if not (isinstance(device, int) and device < 0):
            self._node.current = self._node.index(device)

    def get_device_name(self, device: Any = None) -> str:
        self._node.index(device)
        return self._node.gpu.name

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        self._node.index(device)
        return self._node.gpu.capability

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        gpu, index = self._node.gpu, self._node.index(device)
        return SimpleNamespace(
            name=gpu.name,
            major=gpu.capability[0],
            minor=gpu.capability[1],
            total_memory=gpu.memory_bytes,
            multi_processor_count=gpu.processors,
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
            uuid=f"00000000-0000-0000-0000-{index:012}",
        )

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        self._node.index(device)
        return self._node.gpu.memory_bytes - _SEGMENT_BYTES, self._node.gpu.memory_bytes

    def can_device_access_peer(self, device: Any, peer_device: Any) -> bool:
        return self._node.index(device) != self._node.index(peer_device)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return self._node.gpu.capability >= (8, 0)

    def is_tf32_supported(self) -> bool:
        return self._node.gpu.capability >= (8, 0)

    def get_arch_list(self) -> list[str]:
        return ["sm_{}{}".format(*self._node.gpu.capability)]

    def get_gencode_flags(self) -> str:
        return "-gencode compute=compute_{0}{1},code=sm_{0}{1}".format(*self._node.gpu.capability)

    def is_current_stream_capturing(self) -> bool:
        return False

    def memory_stats(self, device: Any = None) -> defaultdict[str, int]:
        self._node.index(device)
        return defaultdict(int)

    memory_stats_as_nested_dict = host_memory_stats = host_memory_stats_as_nested_dict = memory_stats

    def get_sync_debug_mode(self) -> int:
        return 0

    def get_allocator_backend(self) -> str:
        return "native"

    def get_rng_state(self, device: Any = "cuda") -> torch.Tensor:
        self._node.index(device)
        return torch.get_rng_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [torch.get_rng_state() for _ in range(self._node.count)]

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)

    def current_accelerator(self, check_available: bool = False) -> torch.device:
        return _Device("cuda")


def of_cuda(node: Node) -> dict[str, Any]:
    spoken = Answers(node)
    answers = {name: getattr(spoken, name) for name in dir(spoken) if name[0] != "_"}
    answers["stream"] = lambda stream: StreamContext(stream)  # Not the class: two names of one are one to the compiler.
    answers.update({name: _constant(node, value) for name, value in _CONSTANTS.items()})
    answers.update(dict.fromkeys(_NOTHING, lambda *_args, **_kwargs: None))
    return answers


def of_accelerator(cuda: dict[str, Any]) -> dict[str, Any]:
    dtypes = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
    dtypes |= {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool}
    return {
        **cuda,
        **{name: cuda[as_in_cuda] for name, as_in_cuda in _ACCELERATOR.items()},
        "device_index": torch.cuda.device,
        "get_device_capability": lambda _device=None: {"supported_dtypes": dtypes},
    }


def _constant(node: Node, value: Any) -> Any:
    def answer(device: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        node.index(device)
        return value

    return answer
