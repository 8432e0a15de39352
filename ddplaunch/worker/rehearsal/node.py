"""The GPUs that a rehearsing worker believes in: how many it sees, which is current, what one looks like.

Knows CUDA's rules about them (CUDA_VISIBLE_DEVICES, ordinals, forks) and patches nothing.
"""

from __future__ import annotations

import os
import threading
import warnings
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ddplaunch.worker.rehearsal import Gpu

_Device = type(torch.device("cpu"))  # torch.device itself may be a stand-in by the time a function here looks.

_BAD_ORDINAL = """CUDA error: invalid device ordinal
This dry run pretends {} for this worker (CUDA_VISIBLE_DEVICES and the pretended node decide); the script asked for \
cuda:{}."""
_FORKED = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
    "start method"
)


class Node:
    """The devices of this worker. ``current`` is each thread's own, as CUDA has it."""

    def __init__(self, devices: int, gpu: Gpu) -> None:
        self.devices = devices
        self.gpu = gpu
        self._thread = threading.local()
        self._used_by: int | None = None
        self._count = 0
        self._home: int | None = None

    @property
    def is_used(self) -> bool:
        """By this process: a fork of one that has used a GPU has not, and may not."""
        return self._used_by == os.getpid()

    @property
    def home(self) -> int | None:
        """The GPU that a tensor was last put on; None before the first."""
        return self._home if self.is_used else None

    @property
    def count(self) -> int:
        """CUDA looks at the environment until a device is first used; scripts set it at their start."""
        if self._used_by is not None:
            return self._count
        return visible_count(os.environ.get("CUDA_VISIBLE_DEVICES"), self.devices)

    @property
    def current(self) -> int:
        return getattr(self._thread, "current", 0)

    @current.setter
    def current(self, index: int) -> None:
        self._thread.current = index

    def use(self) -> None:
        """To be called where CUDA would initialise itself.

        Raises:
            RuntimeError: as CUDA: there is no device, or this is a fork of a process that has used one.
        """
        if self._used_by is None:
            self._count, self._used_by = self.count, os.getpid()
        if not self.is_used:
            raise RuntimeError(_FORKED)
        if not self._count:
            raise RuntimeError("No CUDA GPUs are available")

    def index(self, device: Any = None) -> int:
        """Which GPU a function of ``torch.cuda`` is asked about; the current one for None, ``cuda`` and the CPU.

        Torch's own code asks about the device of tensors, which it sees on the CPU.

        Raises:
            RuntimeError: as CUDA: there is no such device.
        """
        if torch.compiler.is_compiling():
            return 0
        self.use()
        if isinstance(device, str):
            device = torch.device(device)
        index = device.index if isinstance(device, _Device) else device
        if index is None or (isinstance(device, _Device) and device.type != "cuda"):
            return self.current
        if not 0 <= index < self._count:
            seen = f"{self._count} GPU{'s' if self._count > 1 else ''}"
            raise getattr(torch, "AcceleratorError", RuntimeError)(_BAD_ORDINAL.format(seen, index))
        return int(index)

    def gpu_index(self, device: Any) -> int | None:
        """Which GPU an argument of a tensor function names; None if it names something else, or is no device."""
        if not is_number(device) and device_type(device) != "cuda":
            return None
        index = self.index(device)
        if not torch.compiler.is_compiling():
            self._home = index
        return index


def device_type(device: Any) -> str:
    """``cuda`` of ``cuda:1``; empty if ``device`` is neither a string nor a device."""
    if isinstance(device, _Device):
        return device.type
    return device.partition(":")[0] if isinstance(device, str) else ""


def is_number(device: Any) -> bool:
    return isinstance(device, Integral) and not isinstance(device, bool)


def visible_count(visible: str | None, devices: int) -> int:
    """How many of ``devices`` GPUs CUDA_VISIBLE_DEVICES leaves: those before the first that does not exist."""
    if visible is None:
        return devices
    seen: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        if name in seen:
            return 0
        if not name.startswith(("GPU-", "MIG-")) and not (name.isdigit() and int(name) < devices):
            break
        seen.append(name)
    return len(seen)


def hide_real_gpus() -> None:
    """Let CUDA, which looks only once, find none: nothing of a dry run reaches a GPU, and torch decides as without."""
    count = getattr(torch._C, "_cuda_getDeviceCount", None)
    if count is None:
        return
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(dict.fromkeys(names, ""))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count()
    for name in names:
        del os.environ[name]
    os.environ.update(before)
