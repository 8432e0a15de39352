"""The fake GPUs of one worker: which are visible and which one is current, and properties of the model.

Implements CUDA's rules for CUDA_VISIBLE_DEVICES, for ordinals, and against use after a fork. Runs in a worker of a dry
run; patches nothing.
"""

from __future__ import annotations

import os
import threading
import warnings
from numbers import Integral
from typing import Any

import torch

from ddplaunch.system.devices import listed

Device = type(torch.device("cpu"))
"""``torch.device`` as it is before it is patched."""

GPU_NAME = "NVIDIA H100 80GB HBM3 (simulated on the CPU)"
MEMORY_BYTES = 80 << 30
CAPABILITY = (9, 0)

_BAD_ORDINAL = """CUDA error: invalid device ordinal
This dry run gives this worker {} (see CUDA_VISIBLE_DEVICES and --gpus); the script used cuda:{}."""
_FORKED = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must initialize the 'spawn' "
    "start method"
)


class FakeDevices:
    """The fake GPUs of this worker. ``current`` is per thread, as in CUDA.

    Args:
        installed: number of GPUs of the node, visible to this worker or not.
    """

    def __init__(self, installed: int) -> None:
        self.installed = installed
        self._thread = threading.local()
        self._initialized_in: int | None = None
        self._count = 0
        self._last_gpu: int | None = None

    @property
    def is_initialized(self) -> bool:
        """Whether this process has initialized CUDA; False in a fork of such a process, which must not use CUDA."""
        return self._initialized_in == os.getpid()

    @property
    def last_gpu(self) -> int | None:
        """The GPU that received the last tensor; None before the first."""
        return self._last_gpu if self.is_initialized else None

    @property
    def count(self) -> int:
        """Number of visible GPUs. As in CUDA, changes of CUDA_VISIBLE_DEVICES count until CUDA is initialized."""
        if self._initialized_in is not None:
            return self._count
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return self.installed if visible is None else len(listed(visible, self.installed))

    @property
    def current(self) -> int:
        return getattr(self._thread, "current", 0)

    @current.setter
    def current(self, index: int) -> None:
        self._thread.current = index

    def initialize(self) -> None:
        """Initialize CUDA in this process, once.

        Raises:
            RuntimeError: with CUDA's message: no GPU is visible, or a process that used CUDA forked this one.
        """
        if self._initialized_in is None:
            self._count, self._initialized_in = self.count, os.getpid()
        if not self.is_initialized:
            raise RuntimeError(_FORKED)
        if not self._count:
            raise RuntimeError("No CUDA GPUs are available")

    def index(self, device: Any = None) -> int:
        """The GPU that the ``device`` argument of a ``torch.cuda`` function names.

        None, ``cuda`` and ``cpu`` name the current GPU: torch's own code sees tensors on the CPU and passes ``cpu``.

        Raises:
            RuntimeError: with CUDA's message: there is no such device.
        """
        if torch.compiler.is_compiling():
            return 0
        self.initialize()
        if isinstance(device, str):
            device = torch.device(device)
        index = device.index if isinstance(device, Device) else device
        if index is None or (isinstance(device, Device) and device.type != "cuda"):
            return self.current
        if not 0 <= index < self._count:
            visible = f"{self._count} GPU{'s' if self._count > 1 else ''}"
            raise getattr(torch, "AcceleratorError", RuntimeError)(_BAD_ORDINAL.format(visible, index))
        return int(index)

    def gpu_index(self, device: Any) -> int | None:
        """The GPU that the ``device`` argument of a tensor function names; None if it names no GPU.

        Raises:
            RuntimeError: with CUDA's message: there is no such device.
        """
        if not is_number(device) and device_type(device) != "cuda":
            return None
        index = self.index(device)
        if not torch.compiler.is_compiling():
            self._last_gpu = index
        return index


def device_type(device: Any) -> str:
    """``cuda`` of ``cuda:1``; empty if ``device`` is neither a string nor a device."""
    if isinstance(device, Device):
        return device.type
    return device.partition(":")[0] if isinstance(device, str) else ""


def is_number(device: Any) -> bool:
    """Whether ``device`` is a device number: ``torch.zeros(2, device=1)``."""
    return isinstance(device, Integral) and not isinstance(device, bool)


def hide_real_gpus() -> None:
    """Make torch find no real GPU, so that a dry run never uses one. Torch counts GPUs only once per process."""
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
